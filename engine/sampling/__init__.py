"""From logits to tokens.

    logits [rows, vocab] --> rules (rows that have any) --> draw --> token ids
              |                                                          |
              '------------------ log-probabilities (rows that ask) -----'

`sampler` has the one entry, `launch`, and `sample` for those who wait; `rules` what a choice keeps and `adjust` what
that does to logits; `draw` temperature, `filters` and the `race` of what they leave; `ranking` the largest logits
without a sort; `logprobs` what is told; `transfer` between host and device.
"""

from engine.sampling.draw import Draw
from engine.sampling.logprobs import Logprobs, prompt_logprobs
from engine.sampling.rules import Rules, rules_for
from engine.sampling.sampler import Drawn, Problem, Sampled, launch, sample

__all__ = [
    "Draw",
    "Drawn",
    "Logprobs",
    "Problem",
    "Rules",
    "Sampled",
    "launch",
    "prompt_logprobs",
    "rules_for",
    "sample",
]
