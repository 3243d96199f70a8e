"""Labelled texts: read or refused by line, and never on both sides of a split."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from app.domain_records import HELD_OUT, PARTS, RecordError, domain_labels, read_records
from tests.app.synthetic_domains import lines, write_lines


def refusal(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecordError) as refused:
        read_records(path)
    return str(refused.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "expected a JSON object"),
        ("[1]", "expected a JSON object"),
        ("[" * 100_000, "recursion"),
        ('"text"', "expected a JSON object"),
        ('{"label": "a"}', 'expected "text" with at least one character, found None'),
        ('{"text": "  ", "label": "a"}', 'expected "text"'),
        ('{"text": 7, "label": "a"}', "found 7"),
        ('{"text": "x"}', 'expected a "label"'),
        ('{"text": "x", "label": "Two Words"}', "found 'Two Words'"),
        ('{"text": "x", "label": 3}', "found 3"),
        (f'{{"text": "x", "label": "{"a" * 10_000}"}}', "found 'aaa"),
        ('{"text": "x", "label": "a", "group": [1]}', '"group"'),
        ('{"text": "x", "label": "a", "answer": 5}', '"answer"'),
        (b'{"text": "\xff", "label": "a"}', "expected a JSON object"),
    ],
)
def test_a_line_that_is_not_right_is_named_by_its_number(
    tmp_path: Path, line: str | bytes, said: str
) -> None:
    good = b'{"text": "fine", "label": "a"}\n\n'
    data = good + (line if isinstance(line, bytes) else line.encode()) + b"\n" + good
    path = tmp_path / "x.jsonl"
    told = refusal(path, data)
    assert told.startswith(f"{path}:3: ") and said in told
    assert len(told) < 300 + len(str(path))


def test_all_faults_are_told_up_to_a_few(tmp_path: Path) -> None:
    assert refusal(tmp_path / "x", "{}\n" * 3).count("expected") == 3
    assert refusal(tmp_path / "x", "{}\n" * 5000).count("expected") == 8


def test_a_missing_an_empty_file_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot be read"):
        read_records(tmp_path / "none.jsonl")
    assert "found none" in refusal(tmp_path / "x", "\n\n")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RecordError, match=r"DOMAIN/\*\.jsonl"):
        read_records(tmp_path / "folder")


def test_in_a_folder_the_label_is_the_folders_name(tmp_path: Path) -> None:
    write_lines(tmp_path / "one" / "x.jsonl", [{"prompt": "p", "answer": "a", "label": "Intent 7"}])
    write_lines(tmp_path / "two" / "y.jsonl", [{"text": "t"}])
    found = read_records(tmp_path)
    assert [(r.text, r.answer, r.label) for r in found] == [("p", "a", "one"), ("t", "", "two")]
    write_lines(tmp_path / "No Label" / "z.jsonl", [{"text": "t"}])
    with pytest.raises(RecordError, match="No Label"):
        read_records(tmp_path)


def groups(path: Path, records: list[dict[str, str]]) -> list[str]:
    return [record.group for record in read_records(write_lines(path, records))]


PASSAGE = "The quick brown fox jumps over the lazy dog while the sun sets behind seven old hills. "
OTHER = "Nobody knows which of the eleven ships came home with its cargo of salt and dried fish. "


def test_texts_that_share_half_of_what_they_say_are_one_group(tmp_path: Path) -> None:
    texts = [PASSAGE * 3, f"Question: {PASSAGE * 3}", OTHER * 3, "unlike the others in every way"]
    found = groups(tmp_path / "x", [{"text": text, "label": "a"} for text in texts])
    assert found[0] == found[1] and len(set(found)) == 3


def test_equal_texts_are_one_group_however_short_and_under_any_label(tmp_path: Path) -> None:
    records = [{"text": "Yes ", "label": "a"}, {"text": "no", "label": "a"}]
    found = groups(tmp_path / "x", [*records, {"text": "yes", "label": "b"}])
    assert found[0] == found[2] != found[1]


def test_what_quotes_the_text_before_it_belongs_to_it(tmp_path: Path) -> None:
    records = [
        {"text": f"A: {PASSAGE} B: Oh yes.", "label": "a"},
        {"prompt": "Oh yes.", "answer": "x", "label": "a"},
        {"prompt": "Oh no.", "answer": "x", "label": "a"},
    ]
    found = groups(tmp_path / "x", records)
    assert found[0] == found[1] != found[2]


def test_groups_that_are_named_are_kept_apart_and_together(tmp_path: Path) -> None:
    records = [
        {"text": "one", "label": "a", "group": "g"},
        {"text": "two", "label": "a", "group": "g"},
        {"text": "three", "label": "a", "group": "h"},
    ]
    assert groups(tmp_path / "x", records) == ["g", "g", "h"]


def test_the_split_is_the_same_in_any_order_and_no_group_is_on_both_sides(tmp_path: Path) -> None:
    made = lines(200)
    made += [{"text": f"About this: {x['text']}", "label": x["label"]} for x in made[:100]]
    parts = {r.text: r.part for r in read_records(write_lines(tmp_path / "x", made))}
    turned = {r.text: r.part for r in read_records(write_lines(tmp_path / "y", made[::-1]))}
    assert parts == turned
    by_group = defaultdict(set)
    for record in read_records(tmp_path / "x"):
        by_group[record.group].add(record.part)
    assert all(len(found) == 1 for found in by_group.values())
    share = sum(part == HELD_OUT for part in parts.values()) / len(parts)
    assert 0.5 / PARTS < share < 2 / PARTS


def test_one_label_alone_is_refused(tmp_path: Path) -> None:
    records = read_records(
        write_lines(
            tmp_path / "x",
            [{"text": "a", "label": "one"}, {"text": "b", "label": "unknown"}],
        )
    )
    with pytest.raises(RecordError, match=r"at least 2 labels, found \['one'\]"):
        domain_labels(records)
