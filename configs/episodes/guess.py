"""Guess a number from 0 to 7 in as few turns as possible: each wrong guess is answered with what is
still possible.

    rollout.episode.path=configs/episodes/guess.py

A model that has never seen text can play it: a turn is one token, and what it reads is short.
"""

NUMBERS = 8


async def episode(row, policy) -> float:
    """1 for the number at once, 1 / max_turns less for each turn more, 0 if it is not found."""
    secret = sum(map(ord, str(row["ground_truth"]))) % NUMBERS
    low, high, most = 0, NUMBERS - 1, policy.turns_left
    for turn in range(most):
        reply = await policy.complete(f" {low}-{high}:", max_tokens=1)
        guess = int(reply.raw) if reply.raw in map(str, range(NUMBERS)) else None
        if guess == secret:
            return 1.0 - turn / most
        if guess is not None and low <= guess <= high:
            policy.reward(0.05)
            low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
    return 0.0
