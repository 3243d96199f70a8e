"""The demo model's trainer: a tiny made-up corpus, three steps, a resumed run, the export."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import typer
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.testing import CliRunner

from tools import train_demo_model
from tools.demo_classifier import DomainClassifier
from tools.demo_corpus import BEGIN, END, STOP, Record, chat_turns, dialogue, render, split
from tools.demo_forward import losses
from tools.demo_measure import top_overlap
from tools.demo_replies import topic_words
from tools.muon import Muon, orthogonalise
from tools.train_demo_model import Plan

ROOT = Path(__file__).resolve().parents[2]
WORDS = {
    "sums": ["three", "plus", "four", "makes", "seven", "apples", "pears", "count", "total"],
    "tales": ["king", "forest", "dragon", "slept", "under", "the", "old", "bridge", "at", "night"],
    "service": ["card", "order", "please", "refund", "my", "account", "late", "parcel"],
}


def made_records(domain: str, count: int, seed: int) -> list[dict[str, str]]:
    rng = random.Random(seed)

    def phrase(length: int) -> str:
        return " ".join(rng.choice(WORDS[domain]) for _ in range(length))

    out = []
    for i in range(count):
        record = {"source": f"made_{domain}"}
        if domain == "tales":
            record["text"] = f"{i} {phrase(30)}."
        elif domain == "sums":
            record |= {"prompt": f"{i} {phrase(12)}?", "answer": phrase(8)}
        else:
            record |= {"prompt": f"{i} {phrase(9)}", "label": "bank/card_late"}
        out.append(record)
    return out


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    for seed, domain in enumerate(WORDS):
        (folder / domain).mkdir(parents=True)
        lines = [json.dumps(r) for r in made_records(domain, 120, seed)]
        (folder / domain / "made.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def arguments(corpus: Path, out: Path, steps: int) -> list[str]:
    return [
        str(corpus), "--out", str(out), "--steps", str(steps), "--minutes", "0", "--rows", "4",
        "--context", "32", "--final-context", "64", "--vocabulary", "320",
        "--share", "tales=0.5", "--small", "--json",
    ]  # fmt: skip


def test_trains_resumes_and_exports(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    command = [sys.executable, str(ROOT / "tools" / "train_demo_model.py")]
    done = subprocess.run(
        command + arguments(corpus, out, 3), capture_output=True, text=True, timeout=120, check=True
    )
    first = json.loads(done.stdout)
    assert first["steps"] == 3
    assert first["tokens"] == 3 * 4 * 32
    app = typer.Typer()
    app.command()(train_demo_model.main)
    resumed = CliRunner().invoke(app, arguments(corpus, out, 5))
    assert resumed.exit_code == 0, resumed.output
    assert "going on from step 3" in resumed.stderr
    second = json.loads(resumed.stdout)
    assert second["steps"] == 5
    assert set(second["perplexity"]) == set(WORDS)

    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(out)
    turns = [{"role": "user", "content": "king"}, {"role": "assistant", "content": ""}]
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert prompt == (f"{BEGIN}user\nking{END}\n{BEGIN}assistant\n{END}\n{BEGIN}assistant\n")
    text = "你好，dragon\n\n  12"
    plain = Tokenizer.from_file(str(out / "tokenizer.json"))
    ids = plain.encode(text).ids
    assert plain.decode(ids) == text
    assert tokenizer(text)["input_ids"] == ids
    stops = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [plain.token_to_id(END), plain.token_to_id(STOP)]
    made = model.generate(torch.tensor([ids]), max_new_tokens=3)
    assert made.shape[1] <= len(ids) + 3
    config = json.loads((out / "config.json").read_text())
    assert config["num_experts"] == 8


def test_forward_equals_the_library() -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=50, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, moe_intermediate_size=8,
        num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.2)
    ids, target = torch.randint(0, 50, (2, 3, 17))
    ours = losses(model, ids, target, torch.tensor([0, 1, 1]))
    ours.token.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    theirs = F.cross_entropy(model(ids).logits.flatten(0, 1), target.flatten())
    theirs.backward()
    assert ours.token.item() == pytest.approx(theirs.item(), rel=1e-5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-3, atol=1e-5)
    assert float(ours.domain.detach()) <= 0.0
    torch.testing.assert_close(ours.load.sum(1), torch.ones(2))


def test_muon_orthogonalises() -> None:
    torch.manual_seed(0)
    singular = torch.linalg.svdvals(orthogonalise(torch.randn(5, 8, 24)))
    assert float(singular.min()) > 0.5
    assert float(singular.max()) < 1.4
    p = torch.nn.Parameter(torch.zeros(3, 16, 8))
    before = p.detach().clone()
    p.grad = torch.randn(3, 16, 8)
    Muon([p], lr=0.1, halves=[p]).step()
    assert float((p.detach() - before).norm()) > 0.1


def test_split_depends_on_content_and_drops_leaks() -> None:
    records = [
        Record("d", "s", "", "", f"Opening number {i} of many words.", "") for i in range(900)
    ]
    heldout = split(records)[1]
    assert 20 < len(heldout) < 80
    assert split(reversed(records))[1] == heldout[::-1]
    held = heldout[0]
    copy = Record("d", "s", "", "", f"Another start of a passage {held.text[:5]}\n{held.text}", "")
    assert held not in split([*records, copy])[1] or copy in split([copy])[1]


def test_renderings() -> None:
    talk = Record("chinese", "s", "", "", "用户：你好\n客服：您好\n用户：谢谢\n客服：不客气", "")
    assert dialogue(talk) == [
        ("user", "你好"), ("assistant", "您好"), ("user", "谢谢"), ("assistant", "不客气"),
    ]  # fmt: skip
    asked = Record("customer_support", "s", "where is it", "", "", "airline/getboardingpass")
    turns = chat_turns(asked, random.Random(1))
    assert turns[-1][0] == "assistant"
    assert topic_words(asked.label) == "get boarding pass"
    assert topic_words("banking/account_blocked") == "account blocked"
    assert {render(asked, random.Random(i)).endswith(STOP) for i in range(5)} == {True}


def test_plan_cools_down() -> None:
    plan = Plan(100, 0.0, 4, 32, 64, 0.2, 0.1, 0, 0.0, 0.0, 0.02, 0.003, True, {})
    assert plan.scale(50, plan.progress(50, 0.0)) == 1.0
    assert plan.scale(90, plan.progress(90, 0.0)) == pytest.approx(0.5)
    assert plan.progress(200, 0.0) == 1.0


def test_measures() -> None:
    one, two = torch.arange(16.0).repeat(2, 1), torch.arange(16.0).flip(0).repeat(2, 1)
    assert top_overlap(one, one) == 1.0
    assert top_overlap(one, two) == 0.0
    classifier = DomainClassifier()
    classifier.fit({name: [" ".join(words)] for name, words in WORDS.items()})
    assert classifier.classify("the dragon slept") == "tales"
    assert classifier.classify("my card order") == "service"
