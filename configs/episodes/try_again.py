"""Questions with a second and a third try: a wrong answer is said to be wrong, a number too high or
too low, and the model may try again. try_again.yaml trains on it; with any other data whose rows
have a scorer:

    rollout.episode.path=configs/episodes/try_again.py
"""

import asyncio

from ppo.rewards.scorers.builtin import score_and_answer
from ppo.rewards.scorers.gsm8k import to_number

TRIES = 3
COST = 0.25
"""of the score, for each try after the first"""


async def episode(row, policy) -> dict[str, float]:
    """The score of the last try, less COST for each that came before.

    An episode that a limit ends returns nothing: let data.max_response_length hold all tries, else
    the means of first_try and last_try are those of the others.
    """
    policy.score = 0.0  # of an episode that a limit ends
    said, found = (), []
    for tries in range(TRIES):
        # each try has its part of the tokens that are left
        reply = await policy.chat(*said, max_tokens=max(1, policy.tokens_left // (TRIES - tries)))
        # in a thread: a scorer may import for seconds, and others of this process go on
        judged = await asyncio.to_thread(
            score_and_answer, row["data_source"], reply.text, row["ground_truth"], row["extra_info"]
        )
        found.append(judged["score"])
        policy.score = judged["score"] * (1 - COST * tries)
        if judged["score"] == 1:
            break
        said = (feedback(judged["pred"], row["ground_truth"]),)
    return {"score": policy.score, "first_try": found[0], "last_try": found[-1]}


def feedback(answer: str | None, truth) -> str:
    """What is said of a wrong answer; of a number, on which side of the true one it is."""
    number, true = to_number(answer or ""), to_number(str(truth))
    if number is None or true is None or number == true:
        return "That is not right. Try again, with the answer alone."
    return f"That is too {'high' if number > true else 'low'}. Try again, with the answer alone."
