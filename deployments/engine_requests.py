"""The requests to the engine that one body becomes: checked, and with nothing of JSON left."""

from __future__ import annotations

import time
from collections.abc import Sequence

from core.errors import RequestError
from core.request import Request
from deployments.admission import most_at_once
from deployments.answer_form import AnswerForm
from deployments.caller import Caller
from deployments.openai_errors import ContextLengthError
from deployments.prompt_text import PromptText
from deployments.rank_channel import RankInfo
from deployments.request_labels import Labels
from deployments.sampling_fields import SamplingFields
from deployments.served_models import Place
from deployments.tool_use import OutputPlan


async def engine_requests(
    place: Place,
    asked: SamplingFields,
    form: AnswerForm,
    plan: OutputPlan,
    caller: Caller,
    labels: Sequence[Labels],
) -> list[Request]:
    """One request for each prompt of `form`, with its labels.

    Raises RequestError and EngineUnavailableError.
    """
    param = "messages" if form.chat else "prompt"
    serving, info = place.group.serving, await place.group.info()
    most = most_at_once(serving, info.max_sequences, form.made, asked.priority)
    if len(form.prompts) > most:
        raise RequestError(
            f"expected at most {most} prompts, as the queue has room for no more at once, "
            f"found {len(form.prompts)}. Send them in several requests.",
            param,
        )
    now_s = time.time()
    requests = []
    for number, prompt in enumerate(form.prompts):
        _check_prompt(prompt, asked, info, param)
        try:
            params = asked.sampling(
                len(prompt.ids),
                info.context_tokens,
                info.vocab_size,
                place.model.defaults,
                serving.default_max_tokens,
                plan.structure,
            )
        except ContextLengthError as error:
            raise ContextLengthError(str(error), error.param or param) from error
        suffix = f"-{number}" if number else ""
        requests.append(
            Request(
                request_id=form.request_id + suffix,
                prompt_ids=prompt.ids,
                params=params,
                n=form.made,
                tenant=caller.tenant,
                arrival_s=now_s,
                priority=asked.priority,
                deadline_s=caller.deadline_s,
                domain=labels[number].domain,
                session=labels[number].session,
            )
        )
    return requests


def _check_prompt(prompt: PromptText, asked: SamplingFields, info: RankInfo, param: str) -> None:
    """Raises RequestError for one that the model cannot take."""
    if not prompt.ids:
        raise RequestError("The prompt has no tokens.", param)
    if prompt.is_beginning:
        raise ContextLengthError(
            f"The prompt has over {len(prompt.ids)} tokens and {asked.limit_param} is "
            f"{asked.token_limit() or 'left out'}; the limit for both together is "
            f"{info.context_tokens} tokens.",
            param,
        )
    if max(prompt.ids) >= info.vocab_size:
        raise RequestError(
            f"expected token ids from 0 to {info.vocab_size - 1}, found {max(prompt.ids)}.",
            param,
        )
