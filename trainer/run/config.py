"""The configuration of a training run: model, text and recipe. A run keeps it as `config.json`."""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from runtimes.base.errors import ConfigError
from runtimes.base.files import read_json
from runtimes.base.options import Option
from runtimes.base.ranges import Range
from runtimes.base.records import from_json, refuse_out_of_range
from runtimes.contract.rule import MemoryRule
from runtimes.contract.sampling import SAMPLING, Sampler, read_sampling
from trainer.model.config import ModelConfig
from trainer.run.choices import CorpusName, refuse_vocab_name
from trainer.run.optimizer_config import Count, OptimizerConfig, PositiveCount, ScheduleConfig

BUILT_IN = Path(__file__).parents[1] / "configs"
Schedule = tuple[tuple[int, int], ...]  # [step, value] pairs


def built_in() -> dict[str, Path]:
    """The JSON files of the built-in configurations by name.

    Their folders group them and are no part of the name.
    """
    return {path.stem: path for path in sorted(BUILT_IN.glob("*/*.json"))}


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """When the average of the weights begins. Exactly one of the two must be given."""

    start_step: Count | None = None
    """Step after which the weights of every step are averaged."""
    patience: Count | None = None
    """The average begins at the first validation that is worse than the best validation more than `patience`
    validations before it (Merity et al. 2018, section 3, with a patience of 5).
    """

    def __post_init__(self) -> None:
        if (self.start_step is None) == (self.patience is None):
            raise ConfigError(
                "averaging has both start_step and patience, or neither; give exactly one of them."
            )
        refuse_out_of_range(self, "averaging.")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    model: ModelConfig
    training: MemoryRule
    """The memory rule of training."""
    evaluation: MemoryRule
    """The memory rule of every score after training."""
    mem_len_schedule: Schedule = ()
    """[step, value] pairs in ascending order; from that step on, `training` has this mem_len."""
    segment_schedule: Schedule = ()
    """The same for the segment of `training`."""
    empty_memory_schedule: Schedule = ()
    """The same kind of pairs; from that step on, all lanes begin with an empty memory every `value` steps, as
    a new stream does, so that the model learns to begin; 0 for only at each pass over the text.
    """
    corpus: CorpusName | None = None
    """The public corpus that the recipe is for; `data` must then be a dataset of it or of own files, unless
    `text` is given; null for any.
    """
    vocab: Annotated[
        str,
        Option(
            "--vocab",
            "The tokens: byte, char, word or subword (byte-level BPE), or the vocabulary in this file: "
            "vocab.json, tokenizer.json, or a SentencePiece .model.",
        ),
    ] = "char"
    min_count: Annotated[
        PositiveCount,
        Option("--min-count", "Leave words out of a vocabulary of words that appear less often than this."),
    ] = 1
    max_size: Annotated[
        Annotated[int, Range(2, 1 << 24, whole=True)] | None,
        Option(
            "--max-size",
            "The most tokens of a vocabulary of words (by default all) or subwords (by default 4,096).",
        ),
    ] = None
    text: Annotated[
        str | None,
        Option("--text", "Train on this UTF-8 text file. By default, a small English text is built in."),
    ] = None
    data: Annotated[
        str | None,
        Option("--data", "Train on this dataset, a folder that `xl-export prepare` has written."),
    ] = None
    start_from: str | None = None
    """Folder of the run whose best weights training starts from (fine-tuning); null for random weights. It is
    read only when the run is made, not when it is resumed.
    """
    batch: PositiveCount = 16
    """Lanes (B), each of which reads a contiguous part of the text."""
    accumulate: PositiveCount = 1
    """A step computes its lanes in that many parts, one after the other, and adds up their gradients."""
    steps: Annotated[PositiveCount, Option("--steps", "Train for this many steps.")] = 1000
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Rule by which a gradient changes the weights."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Schedule of the learning rate."""
    autocast: Literal["none", "bf16", "fp16"] = "none"
    """Precision of the forward and backward pass; fp16 scales the loss. Weights and memory stay fp32."""
    averaging: Averaging | None = None
    """The mean of the weights is validated and exported; null for the weights themselves."""
    patience: Count = 0
    """Training ends when this many validations in a row were no better than the best; 0 for never."""
    seed: Annotated[
        int,
        Range(0, (1 << 63) - 1, whole=True),
        Option("--seed", "Draw random numbers from this seed."),
    ] = 0
    log_every: PositiveCount = 20
    validate_every: PositiveCount = 200
    """Steps between two validations."""
    validate_tokens: PositiveCount | None = 1 << 19
    """The most tokens of the held-out text that such a validation predicts, always the first ones; null for
    all. After the last step, the best weights are scored on all of them.
    """
    checkpoint_every: PositiveCount = 100
    device: Annotated[
        Literal["cpu", "cuda", "mps"],
        Option(
            "--device",
            "Train on this device. With cuda each of several processes uses a GPU; with cpu all share the "
            "CPU. mps is the GPU of an Apple computer, for one process.",
        ),
    ] = "cpu"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """What each of several processes keeps of the weights and the optimiser's state: `ddp` all of them,
    `fsdp` a part (PyTorch's FSDP2), for models beyond one device.
    """
    threads: Annotated[int, Range(0, 1024, whole=True)] = 0
    """CPU threads; 0 for PyTorch's choice."""
    sampling: Sampler = field(default_factory=lambda: Sampler(top_k=40))  # Dai et al. 2019, Appendix E
    """Sampling settings, here and by default in the exported model."""
    sample_tokens: Annotated[int, Range(0, 1 << 20, whole=True)] = 64
    """Length of the text that each validation generates after the beginning of the held-out text; 0
    for none.
    """
    tensorboard: Annotated[
        bool,
        Option("--tensorboard", "Write the metrics as TensorBoard events too, in RUN/tensorboard."),
    ] = False
    wandb: Annotated[
        bool,
        Option(
            "--wandb",
            "Send the metrics to Weights & Biases too; with WANDB_MODE=offline, keep them in RUN/wandb.",
        ),
    ] = False
    peak_tflops: Annotated[float, Range(0, 1e9, exclusive=True)] | None = None
    """The operations that the device of one process can do, in 10^12 a second, of which metrics tell the
    share; null to measure a CPU or look up a GPU.
    """
    compile: bool = False
    """Whether `torch.compile` translates forward and backward pass, which needs a C++ compiler on the CPU and
    Triton on a GPU.
    """
    checkpoint_activations: bool = False
    """Whether a layer keeps only its input and computes the rest again in the backward pass: less memory,
    about a third more time.
    """

    def __post_init__(self) -> None:
        refuse_out_of_range(self)
        refuse_vocab_name(self.vocab)
        if self.batch % self.accumulate:
            raise ConfigError(
                f"accumulate is {self.accumulate}; expected a divisor of batch, which is {self.batch}."
            )
        if self.schedule.min_lr > self.optimizer.lr:
            raise ConfigError(
                f"schedule.min_lr is {self.schedule.min_lr}; expected 0 to optimizer.lr, which is "
                f"{self.optimizer.lr}."
            )
        warmup = self.schedule.warmup_steps
        fine_tune = self.schedule.fine_tune_steps
        if warmup + fine_tune > self.steps:
            raise ConfigError(
                f"schedule.warmup_steps is {warmup} and schedule.fine_tune_steps is {fine_tune}; expected "
                f"both to fit into steps, which is {self.steps}."
            )
        if self.averaging is not None and (self.averaging.start_step or 0) >= self.steps:
            raise ConfigError(
                f"averaging.start_step is {self.averaging.start_step}; expected less than steps, which is "
                f"{self.steps}."
            )
        if self.parallel == "fsdp" and self.autocast == "fp16":
            raise ConfigError(
                "parallel is fsdp and autocast is fp16, whose loss scale is not shared; take autocast bf16, "
                "or parallel ddp."
            )
        if self.parallel == "fsdp" and self.optimizer.kind == "muon":
            raise ConfigError(
                "parallel is fsdp and optimizer.kind is muon, which needs whole matrices; take kind adamw, "
                "or parallel ddp."
            )
        if self.text is not None and self.data is not None:
            raise ConfigError(f"text is {self.text} and data is {self.data}; give only one of the two.")
        if self.training.include_self != self.evaluation.include_self:
            raise ConfigError(
                "training.include_self and evaluation.include_self differ; give both the same value."
            )
        for name, pairs in (("mem_len", self.mem_len_schedule), ("segment", self.segment_schedule)):
            self._check_schedule(name, pairs)
            try:
                for _, length in pairs:
                    dataclasses.replace(self.training, **{name: length})  # type: ignore[arg-type]
            except ConfigError as error:
                raise ConfigError(f"{name}_schedule: {error}") from None
        self._check_schedule("empty_memory", self.empty_memory_schedule)
        longest = self.longest.mem_len
        if self.model.span and self.model.span.maximum > longest:
            raise ConfigError(
                f"model.span.maximum is {self.model.span.maximum} and training.mem_len is {longest}; a span "
                "cannot be longer than the memory. Lower span.maximum, or raise mem_len."
            )

    def _check_schedule(self, name: str, pairs: Schedule) -> None:
        steps = [pair[0] for pair in pairs if len(pair) == 2]
        ascending = steps == sorted(set(steps)) and all(0 <= step < self.steps for step in steps)
        if not ascending or len(steps) < len(pairs):
            raise ConfigError(
                f"{name}_schedule is {[list(pair) for pair in pairs]}; expected [step, {name}] pairs, "
                f"with steps that ascend from 0 and stay below {self.steps}."
            )

    @property
    def longest(self) -> MemoryRule:
        """The training rule with the longest memory and segment of its schedules."""
        M = max([self.training.mem_len, *(value for _, value in self.mem_len_schedule)])
        T = max([self.training.segment, *(value for _, value in self.segment_schedule)])
        return dataclasses.replace(self.training, mem_len=M, segment=T)

    @property
    def validation(self) -> MemoryRule:
        """The rule of evaluation, in segments as long as the training segments if this changes no score.

        A few long steps keep a device busier than many short ones. If positions count from the end of the
        segment, its length changes the scores.
        """
        if not self.evaluation.cuts_change_nothing or self.model.from_segment_end:
            return self.evaluation
        T = max(self.training.segment, self.evaluation.segment)
        return dataclasses.replace(self.evaluation, segment=T)

    def num_bytes(self, lanes: int, shards: int = 1) -> int:
        """Returns an estimate of the memory of training.

        It counts weights, gradients, the optimiser's moments, and what the backward pass keeps.
        """
        from trainer.model.model import count_parameters  # PyTorch is not needed to read a configuration

        model = self.model
        T = max(self.longest.segment, self.evaluation.segment)
        J = max(self.longest.slots, self.validation.slots)
        B = -(-lanes // self.accumulate)
        scores = B * model.heads * T * J
        activations = B * (J + 6 * T) * model.d_model + B * T * 2 * model.d_ff + J * model.d_model
        logits = B * T * model.vocab_size
        layer = 2 * scores + activations
        # With `checkpoint_activations` a layer keeps its input and its memory, and one layer is recomputed.
        kept = layer + model.layers * B * J * model.d_model if self.checkpoint_activations else 0
        return 16 * count_parameters(model) // shards + 4 * ((kept or model.layers * layer) + 2 * logits)

    def with_steps(self, steps: int) -> TrainConfig:
        """The same recipe with this number of steps.

        What begins at a step begins at the same share of all steps. The warm-up is not longer.
        """
        if steps == self.steps or steps < 1:
            return dataclasses.replace(self, steps=steps)

        def moved(pairs: Schedule) -> Schedule:
            return tuple({step * steps // self.steps: value for step, value in pairs}.items())

        warmup = min(self.schedule.warmup_steps, steps)
        fine_tune = min(self.schedule.fine_tune_steps * steps // self.steps, steps - warmup)
        averaging = self.averaging
        if averaging is not None and averaging.start_step is not None:
            averaging = dataclasses.replace(averaging, start_step=averaging.start_step * steps // self.steps)
        return dataclasses.replace(
            self,
            steps=steps,
            schedule=dataclasses.replace(self.schedule, warmup_steps=warmup, fine_tune_steps=fine_tune),
            mem_len_schedule=moved(self.mem_len_schedule),
            segment_schedule=moved(self.segment_schedule),
            empty_memory_schedule=moved(self.empty_memory_schedule),
            averaging=averaging,
        )

    @classmethod
    def from_json(cls, data: Any, *, where: str) -> TrainConfig:
        """A configuration from parsed JSON.

        where: the source, for messages. Raises ConfigError for unknown keys, wrong types and wrong values.
        """
        return from_json(cls, data, where=where)

    @classmethod
    def load(cls, name: str | Path) -> TrainConfig:
        """The configuration in a JSON file, or a built-in one by name (`demo`, `tiny`, …)."""
        path = built_in().get(str(name), Path(name))
        if not path.is_file():
            near = difflib.get_close_matches(str(name), list(built_in()), n=3)
            meant = f"; {' or '.join(near)} was probably meant, and " if near else "; "
            raise ConfigError(
                f"{name} is neither a file nor a built-in configuration{meant}`xl-export train --list` shows "
                "all of them."
            )
        data = read_json(path)
        config = cls.from_json(data, where=str(path))
        if "sampling" not in data and os.path.lexists(path.parent / SAMPLING):  # the file of a run
            return dataclasses.replace(config, sampling=read_sampling(path.parent))
        return config
