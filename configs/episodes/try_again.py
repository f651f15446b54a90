"""Questions of reasoning-gym with a second and a third try: a wrong answer is said to be wrong, and
the model may try again.

    python -m ppo.data.prepare reasoning_gym --task chain_sum --out data/chain_sum
    rollout.episode.path=configs/episodes/try_again.py

The score is the task's own, less for each try; data_source names the task (reasoning_gym/TASK).
"""

import json

from reasoning_gym import get_score_answer_fn  # here: an episode that imports holds up others

TRIES = 3
COST = 0.25
"""of the score, for each try after the first"""


def score_of(row: dict, text: str) -> float:
    """The task's own scorer."""
    metadata = row.get("metadata") or {}
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    entry = {"question": row.get("question", ""), "answer": row["ground_truth"]}
    task = row["data_source"].partition("/")[2]
    return float(get_score_answer_fn(task)(text.strip(), {**entry, "metadata": metadata}))


async def episode(row, policy) -> dict[str, float]:
    """The score of the last try, less COST for each that came before."""
    policy.score = 0.0  # of an episode that a limit ends
    reply = await policy.chat()
    first = right = score_of(row, reply.text)
    tries = 1
    while right < 1.0 and tries < TRIES and policy.turns_left > 0:
        reply = await policy.chat("That is not right. Try again, with the answer alone.")
        right = score_of(row, reply.text)
        tries += 1
    return {"score": right * (1 - COST * (tries - 1)), "first_try": first}
