"""What training shows a classifier of domains: texts as clients send them, and texts of none."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from app.domain_records import Record

CUTS = (40, 100, 100, 200, 300, 600, 4000)
"""Lengths in characters; most prompts are short."""
_SYSTEM = (
    "",
    "Be concise.",
    "You are a helpful assistant.",
    "You are a helpful, respectful and honest assistant. Answer briefly.",
    "You are an AI model. Follow the user's instructions carefully.",
    "Answer the question of the user.",
)
_BEFORE = (
    "",
    "",
    "Hi! ",
    "Hello, ",
    "Question: ",
    "Explain: ",
    "Please help me: ",
    "Can you answer this?\n",
    "Summarise this:\n",
    "Translate to English: ",
)
_SOUND_LIKE = ("bcdfghjklmnpqrstvwxz", "aeiouy")
_SCRIPTS = (
    (0x0400, 0x0460),
    (0x03B1, 0x03CA),
    (0x05D0, 0x05EB),
    (0x0621, 0x064B),
    (0x0905, 0x093A),
    (0x0E01, 0x0E2F),
    (0x3041, 0x3097),
    (0x30A1, 0x30FB),
    (0xAC00, 0xD7A0),
)
_COMMON_WORDS = (
    "de la le et les des en un du une que est pour qui dans a par plus pas au sur ne se ce il sont "
    "avec ont été cette mais comme nous vous leur fait être tout hier soir après avant",
    "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an "
    "werden aus er hat dass sie nach wird bei einer um noch wie einem über gestern haben war",
    "de la que el en y a los se del las un por con no una su para es al lo como más pero sus le "
    "ha este sí porque esta entre cuando muy sin sobre también me hasta hay donde ayer noche",
    "di che e la il un a per in una sono mi ho si lo ma ti le con cosa non come da se del della "
    "dei nel alla più anche questo quella essere stato ieri sera dopo prima molto tutti oggi",
    "de que não o a e do da em um para com uma os no se na por mais as dos como mas foi ao ele "
    "das tem à seu sua ou ser quando muito há nos já está também ontem noite depois cidade",
    "de van het een en in is dat op te zijn met voor niet aan er om ook als dan maar bij uit nog "
    "naar heeft hij door over ze wordt deze geen kan meer moet worden veel gisteren tien trein",
    "w i na z do się nie to jest że o jak ale po co tak za od jego przez dla już był tylko czy "
    "może być ma go jeszcze wszystko kiedy przed nad były wczoraj wieczorem nowa miasto które",
    "och i att det som en på är av för med till den har de inte om ett han men var jag sig från "
    "vi så kan när här nu efter upp under igår kväll hade skulle deras mycket också bara",
    "ve bir bu da de için ile çok daha gibi ne o ama var olarak en kadar sonra ben sen mi değil "
    "olan her şey dün akşam yeni gün iki şehirde herkes oldu açıldı zaman önce bütün onun",
    "a az és hogy nem is egy ez meg de volt ki van csak már el még mint kell ha fel nagyon ezt "
    "vagy azt lesz sem minden tegnap este után amikor városban ahol sokan új lehet majd most",
    "ja on ei se että oli hän mutta niin kuin ovat mitä myös tai joka kun vain sen olla hyvin "
    "nyt sitten eilen illalla uusi kaupungin ihmiset paljon kaikki jos ole minä sinä tämä",
    "a se na je v že to s z o do i ve jako za by ale si po jsem tak pro který ještě byl bylo už "
    "jen jeho kde když podle může včera večer nové město lidé protože jsou nebo také před",
    "dan yang di itu dengan untuk tidak ini dari dalam akan pada juga saya ke karena tersebut "
    "bisa ada mereka lebih telah sudah atau oleh kata kota baru kemarin malam orang semua kami",
    "và của là có cho được không trong một người những với các đã này khi từ đến để như ra sẽ "
    "cũng về nhiều hôm qua thành phố năm tại anh mới thì bị lại sau trên làm còn phải",
    "și de a în la cu o pe nu un din că este mai pentru se care sunt au fost după lui dar ce "
    "fi ca prin sau acest până foarte când oraș nou ieri seară oameni toate între unde peste",
)
_KNOWN_WORDS = 4
_KNOWN_SHARE = 0.01


def view(record: Record, draw: random.Random) -> str:
    """The record as one of many clients might send it: cut, asked about, or with its answer."""
    text = record.text
    kind = draw.random()
    if record.answer and kind < 0.2:
        text = f"{text}\n{record.answer}"
    elif len(record.answer) > 60 and kind < 0.3:
        text = record.answer
    most = draw.choice(CUTS)
    if len(text) > most:
        begin = 0 if draw.random() < 0.6 else draw.randrange(len(text) - most + 1)
        text = text[begin : begin + most]
    wrapped = draw.random()
    if wrapped < 0.3:
        text = draw.choice(_BEFORE) + text
    if wrapped < 0.2:
        text = f"{draw.choice(_SYSTEM)}\n{text}"
    return text


class Nothing:
    """Texts of no domain: noise, other scripts and languages, and words that do not exist.

    What the labelled texts themselves are made of is left out: a domain may well be a language.
    """

    def __init__(self, texts: Sequence[str], draw: random.Random) -> None:
        """`texts` are those of all domains."""
        self._draw = draw
        sample = [text[:2000].lower() for text in draw.sample(list(texts), min(len(texts), 4000))]
        self._sources = [text for text in sample if len(text) > 20 and text.isascii()] or sample
        few = _KNOWN_SHARE * len(sample)
        split = [set(text.split()) for text in sample]
        self._languages = [
            words.split()
            for words in _COMMON_WORDS
            if sum(len(own & _telling(words)) >= _KNOWN_WORDS for own in split) <= few
        ]
        self._scripts = [
            span
            for span in _SCRIPTS
            if sum(any(span[0] <= ord(c) < span[1] for c in set(text)) for text in sample) <= few
        ]

    def text(self) -> str:
        """One of them."""
        draw = self._draw
        size = draw.choice((0, 3, 10, 40, 100, 300, 1000))
        kind = draw.randrange(8)
        if kind <= 1:
            return self._disguised()[: max(size, 20)]
        if kind <= 3 and self._languages:
            return self._foreign(max(4, size // 8))
        if kind == 4 and self._scripts:
            first, last = draw.choice(self._scripts)
            words = range(size // 5 + 1)
            return " ".join(_random_text(draw, range(first, last), 2, 9) for _ in words)
        if kind == 5:
            letters = string.ascii_letters + string.digits + "+/"
            return "".join(draw.choices(letters, k=size))
        if kind == 6:
            return _random_text(draw, range(1, 256), size, size)
        signs = (" ", "\n", "\0", "\ud800", "😀", "🎉", "…", "-", "?", "12", "!", "@#", "ok ")
        return "".join(draw.choices(signs, k=size))

    def _disguised(self) -> str:
        """A text with its letters exchanged: the sound of a language, and no word of it."""
        table: dict[str, str | int | None] = {}
        for letters in _SOUND_LIKE:
            table |= dict(zip(letters, self._draw.sample(letters, len(letters)), strict=True))
        return self._draw.choice(self._sources).translate(str.maketrans(table))

    def _foreign(self, words: int) -> str:
        """Common words of another language between words that do not exist."""
        common = self._draw.choice(self._languages)
        disguised = self._disguised().split() or [""]
        return " ".join(
            self._draw.choice(common if self._draw.random() < 0.6 else disguised)
            for _ in range(words)
        )


def _telling(words: str) -> set[str]:
    return {word for word in words.split() if len(word) > 2}


def _random_text(draw: random.Random, codes: range, least: int, most: int) -> str:
    return "".join(map(chr, draw.choices(codes, k=draw.randint(least, most))))
