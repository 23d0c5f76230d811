"""The laws of beams. Raises: InvariantBroken, by laws.py's word."""

from services.scheduler.core.request import Request
from shared.errors import InvariantBroken


def check_beams(request: Request) -> None:
    """Beams are different texts of one length; answers have tokens from the end of the search on.

    A report is of a beam that has all its tokens computed, and no search waits with all of them.
    """
    who, beams, width = request.request_id, request.beams, len(request.sequences)
    if bool(beams) != request.is_live:
        raise InvariantBroken(f"beams, as long as it lives: {who} has {len(beams)}")
    early = [one.index for one in request.sequences if one.finish is None and one.generated]
    if early:
        raise InvariantBroken(f"beams, answers come at the end: {early} of {who} have tokens")
    if not beams:
        return
    texts = {tuple(beam.generated) for beam in beams}
    if not len(texts) == len(beams) == width - request.num_spare_seats:
        raise InvariantBroken(
            f"beams, each another text: {who} has {len(beams)} beams, {len(texts)} different ones, "
            f"of {width}, and keeps {request.num_spare_seats} seats"
        )
    if len(set(map(len, texts))) > 1:
        raise InvariantBroken(f"beams, all of one length: {sorted(map(len, texts))} in {who}")
    told = [beam for beam in beams if beam.report is not None]
    if len(told) == len(beams):
        raise InvariantBroken(f"beams, no search waits: {who} has all its reports")
    for beam in told:
        table = beam.table if beam.table is not None else beam.swapped
        computed = 0 if table is None else table.num_filled
        if computed != beam.num_tokens:
            raise InvariantBroken(
                f"beams, a report is of all tokens: {computed} of {beam.num_tokens} of {who}"
            )
