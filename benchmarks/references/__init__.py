"""The papers' public code, trained beside this project's: the same text, steps, optimiser and schedule.

The code is not part of this project. The user names a folder with a checkout of it:

- `transformer-xl`: https://github.com/kimiyoung/transformer-xl (PyTorch part), for Dai et al. 2019;
- `adaptive-span`: https://github.com/facebookresearch/adaptive-span, for Sukhbaatar et al. 2019a and 2019b.

It runs in a process of its own, because both projects have modules with common names such as `utils`. What
today's PyTorch asks of it is changed from outside, in the two adapters here; no file of it is changed.
"""
