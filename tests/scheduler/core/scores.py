"""What plans asked of prompts, and what gateways were told of them."""

from shared.messages import Tokens


def asked(house, name):
    """(first position, number) of each score that plans asked for this request."""
    sequence_id = house.sequence(name).sequence_id
    return [
        (row.score.first_position, len(row.score.token_ids))
        for plan in house.plans
        for row in plan.rows
        if row.sequence_id == sequence_id and row.score is not None
    ]


def told(house, name, gateway="g"):
    return house.stream(name, gateway).prompt_logprobs


def runs(house):
    return [run for message in house.replies(Tokens) for run in message.items]
