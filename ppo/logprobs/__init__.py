"""Log-probabilities, entropy and exact KL of tokens without the logits of a whole sequence.

Owns the product of hidden states and the output head and everything up to log softmax(z / T). Knows
nothing of models, configuration or process groups.

Letters: K scored tokens, H hidden, V vocabulary; R rows and C columns of one block of logits.
"""

from ppo.logprobs.blocks import LogitTransform, Reference
from ppo.logprobs.tokens import LabelLogprobs, token_logprobs

__all__ = ["LabelLogprobs", "LogitTransform", "Reference", "token_logprobs"]
