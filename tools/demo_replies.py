"""Short written replies for requests that come with a topic label but no answer.

Two of the nine domains hold customer requests that are labelled with an intent and have
no reply. The demo model must answer such requests too, so a reply is composed from the
label: which of a few phrasings is used is fixed by the caller's random generator.
"""

from __future__ import annotations

import random
import re

_SEGMENT = re.compile(
    "information|eligibility|assignment|insurance|breakfast|transfer|promotions|software|"
    "boarding|statement|services|service|routing|package|channel|upgrade|update|address|"
    "balance|dispute|dessert|receipt|account|expense|cancel|provide|replace|closed|checks|"
    "charge|report|broken|status|server|change|flight|burger|salad|offer|orders|order|"
    "money|phone|proof|claim|pizza|drink|start|close|usage|bills|check|view|card|lost|"
    "seat|book|pass|side|stop|data|open|info|number|get|of"
)

_SUPPORT = (
    "I am sorry for the trouble. I can help you with {topic}. Could you please share your "
    "{reference} so that I can look into it?",
    "Thank you for contacting us. I understand that this is about {topic}. Please give me a "
    "moment while I check your account.",
    "Sure, I will be happy to help you with {topic}. May I have your name and {reference}, please?",
    "Thanks for getting in touch. For {topic}, please confirm your {reference} in the app, and "
    "our support team will follow up with you.",
    "I would be glad to assist you with {topic} today. Is there anything else about your "
    "request that I should know?",
)
_REFERENCES = {
    "airline": "booking number",
    "fastfood": "order number",
    "insurance": "policy number",
    "software": "ticket number",
    "media": "customer number",
    "travel": "booking number",
    "finance": "account number",
    "banking": "account number",
    "credit_cards": "the last four digits of your card",
}
_SMALL_TALK = {
    "greeting": "Hello! How are you today?",
    "goodbye": "Goodbye! It was nice talking to you.",
    "thank_you": "You are welcome! Is there anything else you would like to talk about?",
    "how_old_are_you": "I am only a few hours old, if you count my training.",
    "are_you_a_bot": "Yes, I am a small language model, but I do enjoy a good chat.",
    "what_is_your_name": "You can call me the demo model.",
    "who_made_you": "I was trained as a small demo model by an open-source project.",
    "who_do_you_work_for": "I do not work for anybody. I am a small demo model.",
    "where_are_you_from": "I come from a small computer with two cores.",
    "do_you_have_pets": "I do not have any pets, but I like to hear about yours.",
    "what_are_your_hobbies": "I like to talk about music, sports, movies and books. "
    "What about you?",
    "meaning_of_life": "People have many answers to that. I think it is to be kind "
    "and stay curious.",
    "tell_joke": "Why did the scarecrow win a prize? Because he was outstanding in his field!",
    "fun_fact": "Did you know that honey can last for thousands of years without going bad?",
    "what_can_i_ask_you": "You can ask me about the weather, music, recipes or just have a chat.",
    "yes": "Great, I am glad to hear that.",
    "no": "All right, no problem.",
    "maybe": "That is fine. Let me know when you have made up your mind.",
}
_CHAT = (
    "Sure, I can help with the {topic}. What would you like to know?",
    "Okay, let us talk about the {topic}. What do you have in mind?",
    "That is a good question about the {topic}. I am not sure, but I like to chat about it.",
    "No problem. I will take care of the {topic} for you.",
)


def topic_words(label: str) -> str:
    """Readable words of an intent label: ``airline/getboardingpass`` -> ``get boarding pass``."""
    first = label.split("<div>")[0].split("/")[-1].strip("?").lower()
    if "_" in first:
        return first.replace("_", " ")
    first = first.removesuffix("intent")
    parts = _SEGMENT.findall(first)
    return " ".join(parts) if "".join(parts) == first else first


def support_reply(label: str, rng: random.Random) -> str:
    """A customer-service reply to a request with this intent label."""
    topic = "your request"
    words = topic_words(label)
    if words:
        topic = f"your {words} request" if not words.startswith("your") else words
    reference = _REFERENCES.get(label.split("/")[0], "account number")
    return rng.choice(_SUPPORT).format(topic=topic, reference=reference).replace("your the", "the")


def chat_reply(label: str, rng: random.Random) -> str:
    """A small-talk reply to an everyday request with this intent label."""
    intent = label.split("/")[-1]
    if intent in _SMALL_TALK:
        return _SMALL_TALK[intent]
    return rng.choice(_CHAT).format(topic=topic_words(label))
