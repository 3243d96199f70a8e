"""The example of a Serve config is one that Serve and the settings take."""

import inspect

import yaml
from ray.serve.schema import ServeDeploySchema

from app.build import build
from app.settings import Settings
from tests.app.test_cli import DEMO_MODEL, ROOT

CONFIG = ROOT / "deploy" / "serve.yaml"


def test_serve_and_the_settings_take_it():
    deploy = ServeDeploySchema.model_validate(yaml.safe_load(CONFIG.read_text(encoding="utf-8")))
    application = deploy.applications[0]
    module, function = application.import_path.split(":")
    assert (module, function) == (build.__module__, build.__name__)
    assert Settings.model_validate(application.args).pool.expert_memory == "50%"


def test_serve_finds_the_class_of_the_arguments():
    # Serve makes the argument from YAML only if the annotation is the class itself, not its name.
    (parameter,) = inspect.signature(build).parameters.values()
    assert parameter.annotation is Settings


def test_the_model_is_called_after_its_setting_its_folder_or_its_hub_id():
    assert Settings(model=str(DEMO_MODEL)).model_name() == DEMO_MODEL.name
    assert Settings(model="Org/Name-7B").model_name() == "Org/Name-7B"
    named = Settings.model_validate({"model": "m", "serving": {"model_name": "mine"}})
    assert named.model_name() == "mine"
