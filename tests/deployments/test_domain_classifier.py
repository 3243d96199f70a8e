"""The domain classifier: guesses, what is no text of any domain, its file."""

from __future__ import annotations

import base64
import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from core.errors import SettingsError
from deployments.domain_classifier import (
    NO_GUESS,
    DomainClassifier,
    DomainGuesser,
    Guess,
    calibrated,
    checked,
    load_classifier,
)
from deployments.domain_settings import DomainSettings
from deployments.domain_weights import BUNDLED, DomainWeights, DomainWeightsError
from tests.deployments.small_domains import small_weights

NINE = [
    "chinese", "code", "customer_support", "finance", "general_chat", "legal", "math", "medical",
    "stories",
]  # fmt: skip
ASKED = {
    "chinese": "你好，我想找一家人均消费在一百元左右的餐馆，请推荐一下。",
    "code": "def merge(a: list, b: list) -> list:\n    return sorted(a + b)\n# What is returned?",
    "customer_support": "hi, i was charged twice on my card, can you give me a refund?",
    "finance": "From the annual report: net sales for fiscal 2019 were $12.4 million, up "
    "by 8% over the prior year. What was the change in operating income?",
    "general_chat": "Do you like basketball? I watched the game last night, it was so much fun!",
    "legal": "This Agreement shall be governed by the laws of the State of Delaware, and either "
    "party may terminate it upon thirty days' written notice.",
    "math": "Tom has 12 apples and gives 3 to each of his 2 friends. How many apples are left?",
    "medical": "What are the symptoms of chronic kidney disease, and how is it treated?",
    "stories": "Once upon a time there was a little girl named Lily who lived near a big forest. "
    "One day she found a shiny stone.",
}
OF_NONE = {
    "empty": "",
    "spaces": " \n\t  \n",
    "a surrogate": "\ud800",
    "nulls": "\0" * 50,
    "emoji": "🎉😀" * 20,
    "digits": "123456789 " * 4,
    "a question mark": "?",
    "base64": base64.b64encode(random.Random(1).randbytes(200)).decode(),
    "hexadecimal": random.Random(2).randbytes(100).hex(),
    "bytes": random.Random(3).randbytes(400).decode("latin-1"),
    "no words": "qwxz plorf gnurtle vaskim drobbet lunfar sitchel",
    "Spanish": "El equipo perdió anoche el partido contra su rival de siempre tras la prórroga.",
    "Portuguese": "Ontem à noite a câmara municipal aprovou a reforma da velha estação.",
    "Swedish": "I går kväll öppnades en ny utställning i staden.",
    "Polish": "Wczoraj wieczorem w mieście otwarto nową wystawę sztuki współczesnej.",
    "Hungarian": "Tegnap este új kiállítás nyílt a városban, ahol sokan jártak.",
    "Vietnamese": "Hôm qua thành phố khai trương một cuộc triển lãm mới.",
    "Russian": "Вчера вечером в городе открылась новая выставка современного искусства.",
    "Arabic": "افتتح المعرض الجديد أبوابه أمام الزوار مساء أمس في وسط المدينة",
    "Hindi": "कल शाम शहर में एक नई प्रदर्शनी का उद्घाटन हुआ।",
    "Japanese": "きのうのよる、まちであたらしいてんらんかいがひらかれました。",
    "Korean": "어제 저녁 시내에서 새로운 전시회가 열렸습니다.",
}


@pytest.fixture(scope="module")
def bundled() -> DomainClassifier:
    return DomainClassifier(DomainWeights.read(BUNDLED))


def test_the_bundled_classifier_knows_nine_domains(bundled: DomainClassifier) -> None:
    assert list(bundled.labels) == NINE
    assert BUNDLED.stat().st_size < 1.5 * 1024**2


@pytest.mark.parametrize("domain", NINE)
def test_a_plain_text_of_a_domain_is_guessed(bundled: DomainClassifier, domain: str) -> None:
    guess = bundled.guess(ASKED[domain])
    assert guess.domain == domain and guess.confidence > 0.8


@pytest.mark.parametrize("name", OF_NONE)
def test_a_text_of_no_domain_is_not_guessed_at(bundled: DomainClassifier, name: str) -> None:
    assert bundled.guess(OF_NONE[name]) == NO_GUESS


ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=400)


@settings(max_examples=60, deadline=None)
@given(ANY_TEXT)
def test_any_text_has_probabilities_and_one_answer(text: str) -> None:
    classifier = DomainClassifier(small_weights())
    row = classifier.probabilities(text)
    assert row.shape == (3,) and np.isfinite(row).all() and abs(row.sum() - 1) < 1e-9
    guess = classifier.guess(text)
    assert guess == classifier.guess(text)
    assert (guess == NO_GUESS) == (row.argmax() == 2 or row.max() < 0.5)


def test_below_the_threshold_there_is_no_guess() -> None:
    text = "pizza " + "word " * 12
    assert DomainClassifier(small_weights(threshold=0.5)).guess(text).domain == "food"
    assert DomainClassifier(small_weights(threshold=0.999)).guess(text) == NO_GUESS


def test_a_higher_temperature_is_less_sure_of_the_same() -> None:
    weights = small_weights()
    cold = DomainClassifier(weights).probabilities("a pizza with salad please")
    warm = DomainClassifier(replace(weights, temperature=4.0)).probabilities(
        "a pizza with salad please"
    )
    assert cold.argmax() == warm.argmax() and cold.max() > warm.max()


def test_scores_of_any_size_are_probabilities() -> None:
    rows = calibrated(np.array([[1e30, -1e30, 0.0], [-1e4, -1e4, -1e4]], dtype=np.float32), 1.0)
    assert np.allclose(rows, [[1, 0, 0], [1 / 3] * 3])


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    weights = small_weights()
    # Training gives arrays whose rows do not lie one behind the other.
    strided = replace(weights, weights=np.asfortranarray(weights.weights))
    for number, each in enumerate((weights, strided)):
        path = tmp_path / f"{number}.safetensors"
        each.write(path)
        read = DomainWeights.read(path)
        assert np.array_equal(read.weights, weights.weights)
        assert np.array_equal(read.bias, weights.bias)
        for name in ("labels", "features", "temperature", "threshold", "facts"):
            assert getattr(read, name) == getattr(weights, name)
    same = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    assert len(same) == 2 and same[0] == same[1]


Damage = Callable[[bytes], bytes]


def metadata(**changes: str | None) -> Damage:
    def change(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        old = json.loads(data[8 : 8 + size])["__metadata__"]
        new = {k: v for k, v in {**old, **changes}.items() if v is not None}
        return bytes(save(load(data), new))

    return change


def tensors(**changes: np.ndarray | None) -> Damage:  # type: ignore[type-arg]
    def change(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        old = json.loads(data[8 : 8 + size])["__metadata__"]
        new = {k: v for k, v in {**load(data), **changes}.items() if v is not None}
        return bytes(save(new, old))

    return change


def with_nan(data: bytes) -> bytes:
    weights = load(data)["weights"].copy()
    weights[1, 7] = np.nan
    return tensors(weights=weights)(data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: b"", "something else or a part of one"),
        (lambda data: data[:100], "something else or a part of one"),
        (lambda data: data[:-100], "header|incomplete|cover"),
        (lambda data: b"\x80\x04K\x01." * 20, "something else or a part of one"),
        (lambda data: (4).to_bytes(8, "little") + b"[[]]" + data, "metadata"),
        (metadata(version="2"), "version 1, found .* of version '2'"),
        (metadata(format="another"), "found 'another'"),
        (lambda data: (10**5).to_bytes(8, "little") + b"[" * 10**5, "recursion"),
        (metadata(labels=None), "expected 'labels', found none"),
        (metadata(labels="[" * 5000), "recursion"),
        (metadata(labels=json.dumps(["x" * 9000] * 2)), "of a-z[^x]+x{,200}[.]"),
        (metadata(labels='["food", "code"]'), "sorted"),
        (metadata(labels='["code", "unknown"]'), "sorted, none"),
        (metadata(labels='["Code", "food"]'), "of a-z"),
        (metadata(labels='["code", "food", "x"]'), r"expected weights of float16 \(4, 4096\)"),
        (metadata(buckets="1000"), "power of two"),
        (metadata(buckets="8192"), r"\(3, 8192\), found float16 \(3, 4096\)"),
        (metadata(char_orders="[99]"), "orders from 1 to 8"),
        (metadata(char_orders="[2.5]"), "expected whole numbers as char_orders"),
        (metadata(word_orders='"12"'), "expected whole numbers as word_orders"),
        (metadata(hash_seed="x"), "invalid literal"),
        (metadata(temperature="nan"), "temperature"),
        (metadata(temperature="0"), "temperature"),
        (metadata(threshold="1.5"), "threshold"),
        (tensors(bias=None), "bias"),
        (tensors(bias=np.zeros(3, dtype=np.float64)), "expected bias of float32"),
        (with_nan, "found NaN"),
    ],
)
def test_a_file_that_is_not_right_is_refused_and_says_what_to_do(
    tmp_path: Path, damage: Damage, said: str
) -> None:
    path = tmp_path / "w.safetensors"
    small_weights().write(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DomainWeightsError, match=said) as refused:
        DomainWeights.read(path)
    assert str(path) in str(refused.value) and "coterie domains train" in str(refused.value)


@pytest.mark.parametrize("path", ["/dev/zero", "/", "/none", "/a\0b"])
def test_what_is_no_file_is_refused_without_reading_it(path: str) -> None:
    with pytest.raises(DomainWeightsError, match="coterie domains train"):
        DomainWeights.read(Path(path))


def test_a_file_that_is_set_is_read_before_anything_starts(tmp_path: Path) -> None:
    missing = DomainSettings(classifier=str(tmp_path / "none.safetensors"))
    with pytest.raises(SettingsError, match=r"domains\.classifier: .*none\.safetensors"):
        checked(missing)
    (tmp_path / "old.safetensors").write_bytes(b"old")
    with pytest.raises(SettingsError, match=r"old\.safetensors"):
        checked(DomainSettings(classifier=str(tmp_path / "old.safetensors")))


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small_weights().write(Path("w.safetensors"))
    Path("key").write_bytes(os.urandom(32))
    made = checked(DomainSettings(classifier="w.safetensors", session_key_file="key"))
    assert made.classifier == str(tmp_path / "w.safetensors")
    assert made.session_key_file == str(tmp_path / "key")
    assert checked(DomainSettings()) == DomainSettings()


def test_a_file_that_vanished_leaves_every_text_unknown_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "w.safetensors"
    small_weights().write(path)
    domains = checked(DomainSettings(classifier=str(path)))
    path.unlink()
    with caplog.at_level("WARNING", logger="ray.serve"):
        guesser = DomainGuesser.open(domains)
        assert guesser.guess("a pizza") == NO_GUESS
        assert guesser.guess("a salad") == NO_GUESS
    assert [record.message for record in caplog.records if "unknown" in record.message] != []
    assert len(caplog.records) == 1 and guesser.labels == ()


def test_off_guesses_nothing() -> None:
    assert load_classifier(DomainSettings(classifier="off")) is None
    assert DomainGuesser.open(DomainSettings(classifier="off")).guess("pizza") == NO_GUESS


def test_a_text_that_raises_is_unknown_and_the_next_one_is_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier = DomainClassifier(small_weights())
    right = classifier.guess

    def guess(text: str) -> Guess:
        if "poison" in text:
            raise RuntimeError("poisoned")
        return right(text)

    monkeypatch.setattr(classifier, "guess", guess)
    guesser = DomainGuesser(classifier)
    with caplog.at_level("ERROR", logger="ray.serve"):
        found = [guesser.guess(text).domain for text in ("pizza", "poison", "poison", "def")]
    assert found == ["food", "", "", "code"] and len(caplog.records) == 1
