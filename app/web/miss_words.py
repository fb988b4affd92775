"""Why the prefix cache held no more of a prompt, in words."""

import msgspec

from app.web.templating import format_count
from engine.records import PrefixMiss


class MissView(msgspec.Struct, frozen=True, kw_only=True):
    """Words, then perhaps a step and a request, each a link."""

    words: str
    step: int = 0
    request: str = ""


def describe_miss(miss: PrefixMiss | None) -> MissView:
    """Put a miss into words; the template adds step and request as links."""
    if miss is None:
        return MissView(words="all that can be was there")
    position = format_count(miss.position)
    match miss.kind:
        case "evicted":
            words = f"the next block, from token {position} on, was evicted at step"
            return MissView(words=words, step=miss.step, request=miss.request_id)
        case "differs":
            return MissView(
                words=f"differs at token {position} from what was cached", request=miss.request_id
            )
        case "new":
            return MissView(words=f"from token {position} on nothing like it was cached")
        case other:
            return MissView(words=other)
