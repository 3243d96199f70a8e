"""A text that is not about its domain is found out by the experts that it uses."""

from __future__ import annotations

import numpy as np

from expert_pool.domain_popularity import DomainPopularity, Label
from expert_pool.label_judge import ENOUGH_TOKENS, LabelJudge

LAYERS, EXPERTS, TOP_K = 4, 16, 2
HOME = {"code": range(4), "law": range(4, 8), "poems": range(8, 12)}


class Traffic:
    """Texts of topics; a tenant says what it likes of them."""

    def __init__(self, seed: int = 0) -> None:
        self.draw = np.random.default_rng(seed)
        self.known = DomainPopularity(LAYERS, EXPERTS, 2**20, 0.5)
        self.judge = LabelJudge(self.known)
        self.texts = 0

    def text(self, tenant: str, says: str, topic: str, tokens: int = 100) -> bool:
        """Whether its label was believed at its end."""
        chances = np.full(EXPERTS, 0.2)
        chances[list(HOME[topic])] = 3.0
        scores = np.log(chances) + self.draw.gumbel(size=(tokens, LAYERS, EXPERTS))
        chosen = np.argsort(-scores, axis=2)[:, :, :TOP_K]
        self.texts += 1
        label = Label(tenant, says, "")
        for part in np.array_split(chosen, 4):
            counts = np.stack(
                [np.bincount(part[:, la].ravel(), minlength=EXPERTS) for la in range(LAYERS)]
            )
            passed = np.full(LAYERS, float(len(part)))
            self.judge.look(self.texts, label, counts, passed)
            learned = self.judge.teaches(self.texts, label)
            self.known.learn(label if learned else label._replace(domain=""), counts, passed)
            self.known.learn_everyone(counts, passed)
        return self.judge.believes(self.texts)

    def code_share(self, tenant: str = "newcomer") -> float:
        """What the code's own experts are given of the domain "code"."""
        rates = self.known.expected(Label(tenant, "code", ""))
        return float(rates[:, list(HOME["code"])].sum() / rates.sum())


def honest(traffic: Traffic, rounds: int) -> list[bool]:
    return [
        traffic.text(f"honest {topic}", topic, topic)
        for _ in range(rounds)
        for topic in ("code", "law", "poems")
    ]


def test_right_labels_are_believed():
    traffic = Traffic()
    assert all(honest(traffic, 10))
    assert traffic.judge.wrong == 0
    assert traffic.code_share() > 0.8


def test_a_client_that_labels_everything_code_does_not_spoil_it():
    traffic = Traffic()
    honest(traffic, 5)
    before = traffic.code_share()
    newcomers, believed = [], []
    for number in range(30):
        topic = ("law", "poems", "code")[number % 3]
        believed.append((topic, traffic.text("liar", "code", topic)))
        assert all(honest(traffic, 1)), "those who are right are believed"
        newcomers.append(traffic.code_share())
    assert traffic.judge.wrong >= 8, "most of its other texts are found out, and counted"
    assert all(found for topic, found in believed if topic == "code")
    assert traffic.code_share("honest code") > before - 0.05
    assert min(newcomers) > 0.5, "what it may spoil is capped"
    assert np.median(newcomers[10:]) > before - 0.05, "and not for long"


def test_what_a_liar_taught_while_it_was_alone_counts_no_more_when_others_come():
    traffic = Traffic()
    for number in range(12):
        traffic.text("liar", "code", ("law", "poems", "code")[number % 3])
    assert traffic.judge.doubts(Label("liar", "code", "")), "it says no more than everyone's"
    shares = []
    for number in range(12):
        traffic.text("liar", "code", ("law", "poems", "code")[number % 3])
        traffic.text("honest code", "code", "code")
        shares.append(traffic.code_share())
    assert min(shares) > 0.6


def test_the_odd_one_out_counts_for_one_of_several_though_it_alone_differs_from_everyone():
    traffic = Traffic()
    for _ in range(12):
        traffic.text("most", "code", "code")
        traffic.text("others", "code", "code")
        traffic.text("odd", "code", "law")
        honest(traffic, 1)
    assert traffic.code_share() > 0.6
    assert traffic.code_share("odd") < 0.4, "it is served by its own notion"


def test_a_short_text_is_not_judged():
    traffic = Traffic()
    honest(traffic, 5)
    assert traffic.text("ann", "code", "law", tokens=ENOUGH_TOKENS // 2)
    assert traffic.judge.wrong == 0


def test_names_that_others_invent_do_not_make_a_tenants_record_forgotten():
    traffic = Traffic()
    for number in range(12):
        traffic.text("liar", "code", ("law", "poems", "code")[number % 3])
    assert traffic.judge.doubts(Label("liar", "code", ""))
    record = traffic.judge._tenants["liar", "code"]
    for number in range(400):
        traffic.text("flood", f"name {number}", "law", tokens=8)
    assert traffic.judge._tenants["liar", "code"] is record
    assert traffic.judge.doubts(Label("liar", "code", ""))


def test_what_is_known_of_texts_and_doubts_stays_bounded():
    traffic = Traffic()
    honest(traffic, 3)
    for number in range(400):
        traffic.text(f"t{number}", "code", "law", tokens=80)
    assert len(traffic.judge._texts) <= 256
    assert len(traffic.judge._tenants) <= 256
    assert len(traffic.known.uncounted) <= len(traffic.known._domains.rows)
