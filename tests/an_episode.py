"""Episodes for tests, whose tools answer the same every time: rollout.episode.path names this file.

Only what an episode's process has may be imported here.
"""


async def episode(row, policy):
    """Three turns and a branch; the last digit of the row's number decides how it ends."""
    kind = sum(map(ord, str(row["ground_truth"]))) % 4
    first = await policy.chat(max_tokens=6)
    policy.reward(0.125 * (len(first.ids) % 3))
    if kind == 0:
        raise ValueError("this environment crashes")
    if kind > 1:
        branch = policy.branch()
        await branch.complete("?", max_tokens=4)
        branch.reward(0.5)
    second = await policy.complete(f"={sum(first.ids) % 97};", max_tokens=5, stop=["e"])
    policy.reward(0.25)
    if kind == 3:
        return None
    last = await policy.chat({"role": "user", "content": "more"}, max_tokens=6)
    return {"score": (sum(last.ids) + len(second.ids)) % 11 / 10, "length": len(last.ids)}
