"""Artefacts of a user's module, whose graph PyTorch traces: `trace(module, out, …)`.

In fp32 nothing here imports the package `trainer`: a user's folder may have a `trainer.py` of its own.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir
from torch import nn

from runtimes.base.errors import ConfigError
from runtimes.base.folders import refuse_existing
from runtimes.base.kinds import ARTEFACT
from runtimes.base.machine import package_versions
from runtimes.contract.memory_identity import MemoryIdentity
from runtimes.contract.precision import QUANTISED, MemoryPrecision, MemoryType, Precision
from runtimes.contract.promises import PROMISES, Promise
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import GRAPH, Spec, Target
from runtimes.contract.tensors import AnyForm
from runtimes.contract.vocabulary import Vocab
from runtimes.contract.vocabulary.files import vocab_from_file
from runtimes.sessions.onnx_runtime import OrtSession
from xl_export.artefact.options import ExportOptions, fixed_tokens, listed
from xl_export.artefact.original import Original, OriginalStreams
from xl_export.artefact.quality import first_tokens
from xl_export.artefact.write import (
    finite_arrays,
    refuse_if_too_large,
    refuse_needless_text,
    stamp,
    write_artefact,
)
from xl_export.graph.ops import OPSETS, TYPES, save_graph, save_model
from xl_export.shadow import shadowed
from xl_export.tracing.graph import several_steps, traced_body, traced_graph
from xl_export.tracing.module import (
    ModuleStep,
    digest_of,
    facts_of,
    form_of,
    refuse_other_modules,
)
from xl_export.tracing.progress import stage
from xl_export.tracing.recurrent import Recurrent
from xl_export.tracing.session import ModuleSession
from xl_export.tracing.state import refuse_state, restored
from xl_export.tracing.verify import check_module, drift_of


def trace(
    module: Any,
    out: Path | str,
    *,
    vocab: Vocab | Path | str | None = None,
    rule: MemoryRule,
    memory: AnyForm | None = None,
    without: Collection[Promise] = (),
    rows: int | None = None,
    tokens: Collection[int] | None = None,
    target: Target = "onnxruntime",
    precision: Precision | None = None,
    memory_precision: MemoryPrecision | None = None,
    text: Path | None = None,
    original: Original | None = None,
    force: bool = False,
) -> Path:
    """Writes the artefact of a PyTorch module to the folder `out`, and returns that folder.

    - module: with the interface of `xl_export.tracing.module.StepModule`, or of `NamedModule` if it is no
      language model; or an `nn.LSTM` or `nn.GRU`, which reads `input` and returns `output`. It is traced in
      evaluation mode, so dropout is off, and is unchanged afterwards.
    - vocab: of the token ids of a language model: an `xl_export.CharVocab` or another vocabulary, or the path
      of a `tokenizer.json`, of a SentencePiece `.model` or of a `vocab.json`.
    - rule: its memory length, its longest segment and its mask. The memory length is the number of tokens
      that the module remembers, and determines how long the comparison with PyTorch continues.
    - memory: the form of its memory tensors. None finds it from their shapes. `own` uses them as they
      are, whatever form they look like.
    - without: the promises that the module may break, of `runtimes.contract.promises.PROMISES`. The artefact
      lists those that it does break, and every runtime refuses to rely on them.
    - rows: the graph gets no sizes that vary: every step has so many rows, and `rule.segment` tokens in each.
      The module is called with no other number of rows. Some modules can be traced only so, and some
      accelerators need it. None lets both vary.
    - tokens: several numbers of tokens, from 1 to `rule.segment`, such as (1, 16): a graph for each, over one
      file of weights. A step then has any number of tokens up to the segment, and a session computes it by
      the largest graphs that fit. None is (1, `rule.segment`) for a module whose `step_tokens` are fewer than
      the segment; of any other module it is one graph, with `rows` only for `rule.segment` tokens.
    - target, precision, memory_precision, force: as in `xl_export.export`.
    - text: on which a reduced precision is measured. None is one that the model draws.

    - original: the model's own loop, `original(inputs, state) -> (outputs, state)`. The inputs are those of
      `step`, but of one row and of any number of next tokens; the state None begins a stream; the outputs are
      as `step` returns them. Module and artefact must give its answers, and the artefact states the largest
      difference. None is the attribute `original` of the module, as adapters set it, if it has one. If the
      module has an attribute `equals_up_to`, only texts of at most that length are compared.

    First the module is compared with itself (`xl_export/tracing/verify.py`). Then its graph is compared with
    it, as in `xl_export.export`. Raises UserError if either fails, and if the step cannot be traced;
    `out` is not changed then.
    """
    out = Path(out)
    sources = [text] if text else []
    refuse_existing(out, ARTEFACT, force=force, sources=sources)
    options = ExportOptions(
        exporter="trace", target=target, precision=precision, memory_precision=memory_precision, rows=rows
    )
    precision, memory_precision = options.precisions
    if precision != "fp32" and (sentence := shadowed()):  # what lowers a graph imports `trainer`
        raise ConfigError(sentence)
    if isinstance(module, nn.LSTM | nn.GRU):
        module = Recurrent(module)
    refuse_other_modules(module)
    refuse_other_rules(rule)
    if isinstance(vocab, str | Path):
        vocab = vocab_from_file(Path(vocab))
    if unknown := set(without) - set(PROMISES):
        raise ConfigError(
            f"without has {min(unknown, key=str)!r:.40}; expected some of {', '.join(PROMISES)}."
        )
    with restored(module):
        step = ModuleStep(module.eval(), rows)
        refuse_state(step, rule.segment)
        exact = module_spec(step, vocab, rule, memory)
        if exact.circular and (own := step.step_tokens) and rule.segment > own:
            raise ConfigError(
                f"{step.name} has step_tokens={own} and writes a ring, which a graph of {rule.segment} "
                f"tokens would write several times; give a rule with segment={own}."
            )
        counts = fixed_tokens(dataclasses.replace(exact, target=target), rows, tokens, step.step_tokens)
        exact = dataclasses.replace(exact, fixed_rows=rows, fixed_tokens=counts)
        spec = dataclasses.replace(
            exact, target=target, precision=precision, memory_precision=memory_precision
        ).completed()
        if not step.language_model:
            refuse_for_named(spec, text)
        if target == "tensorrt" and spec.circular:
            raise ConfigError(
                "the memory of the module is a ring, and TensorRT has no circular TensorScatter; let the "
                "module shift its memory, or leave out target."
            )
        refuse_needless_text(text, spec)
        refuse_if_too_large(spec)
        unkept = check_module(step, rule, spec.form, without)
        if "rows" in unkept and rows not in (None, 1):
            raise ConfigError(
                f"rows is {rows}, and the rows of {step.name} change each other (without has `rows`); give "
                "rows=1."
            )
        if "rows" in unkept and rows is None and (step.step_tokens or rule.segment) < rule.segment:
            raise ConfigError(
                f"a graph computes {rule.segment} tokens of {step.name} at once, as rows, and its rows "
                "change each other (without has `rows`); give rows=1."
            )
        if "cuts" in unkept and spec.fixed_tokens:
            raise ConfigError(
                f"tokens is {listed(spec.fixed_tokens)}, so a session cuts steps, and the answers of "
                f"{step.name} depend on the cuts (without has `cuts`); leave tokens out."
            )
        if drift := drift_of(step, rule, spec.form):
            warnings.warn(drift.sentence, stacklevel=2)
            spec = dataclasses.replace(spec, drifts_from=drift.position)
        spec, exact = (
            dataclasses.replace(x, rounding=step.rounding, mean_rounding=step.mean_rounding)
            for x in (spec, dataclasses.replace(exact, without=unkept))
        )
        spec, exact = spec.completed(), exact.completed()
        session = ModuleSession(step, vocab, exact)
        up_to = getattr(module, "equals_up_to", None)
        streams = None
        if loop := original or getattr(module, "original", None):
            with stage("comparing the module with itself") as begins:
                begins("its original")
                streams = OriginalStreams(loop, step, exact, up_to)
                streams.difference(session)
        write_artefact(
            dataclasses.replace(spec, without=unkept, equals_up_to=up_to),
            out,
            TracedGraphs(step, vocab).write,
            session,
            vocab,
            apart=streams.difference if streams else None,
            tokens=first_tokens(text, vocab) if text and vocab else None,
            force=force,
            sources=sources,
        )
    return out


def refuse_other_rules(rule: MemoryRule) -> None:
    """Raises ConfigError for parts of a rule that a module of the user knows nothing of."""
    if not isinstance(rule, MemoryRule):
        raise ConfigError(f"rule is of type {type(rule).__name__}; expected an xl_export.MemoryRule.")
    plain = MemoryRule(mem_len=rule.mem_len, segment=rule.segment, mask=rule.mask)
    for name in ("clamp_len", "initial_memory", "include_self"):
        if (value := getattr(rule, name)) != (default := getattr(plain, name)):
            raise ConfigError(
                f"{name} is {value!r}, and a module that is traced decides this itself; leave it at "
                f"{default!r}."
            )


def refuse_for_named(spec: Spec, text: Path | None) -> None:
    """Raises ConfigError for what only a language model is exported with."""
    if spec.target != "onnxruntime":
        raise ConfigError(
            "a step that is no language model is exported for ONNX Runtime, and the target is "
            f"{spec.target}; leave it out."
        )
    if text is not None:
        raise ConfigError(
            "text is for a language model, and what a lower precision costs another step is measured on "
            "random inputs; leave text out."
        )
    if not spec.compared_outputs:
        raise ConfigError(
            "all outputs of the module are ids, by which a lower precision cannot be compared with fp32; "
            "return the numbers from which they follow too, or leave out the precisions."
        )


def module_spec(step: ModuleStep, vocab: Vocab | None, rule: MemoryRule, memory: AnyForm | None) -> Spec:
    """The contract of a module's artefact in fp32 for ONNX Runtime; raises ConfigError if its parts do not
    fit.
    """
    facts = facts_of(step.module)
    if (vocab is None) == step.language_model:
        raise ConfigError(
            f"{step.name} has `sizes`, as a language model; give the vocab of its token ids."
            if vocab is None
            else f"{step.name} has `inputs`, so it is no language model; leave vocab out, or give it `sizes`."
        )
    if vocab is not None and not isinstance(getattr(vocab, "size", None), int):
        raise ConfigError(
            f"vocab is of type {type(vocab).__name__}; expected an xl_export.CharVocab, another vocabulary, "
            "or the path of a tokenizer.json."
        )
    if vocab is not None and vocab.size != facts.vocab_size:
        raise ConfigError(
            f"the vocabulary has {vocab.size} symbols and the module {facts.vocab_size}; one is of another "
            "model."
        )
    if (S := step.moves_every) is not None and rule.segment > S:
        raise ConfigError(
            f"segment is {rule.segment}, and the memory of {step.name} moves every {S} tokens; give a rule "
            f"with segment={S} or less."
        )
    finite_arrays(step.module)
    form, shapes = form_of(step, facts, rule, memory)
    weights = digest_of(step.module)
    inputs, outputs = ((), ()) if step.language_model else step.signature(rule.segment)
    return Spec(
        model=facts,
        rule=rule,
        form=form,
        precision="fp32",
        opset=OPSETS[form],
        memory_identity=MemoryIdentity(layout="", weights=weights),  # `write_artefact` adds the layout
        producer=package_versions(),
        source={"module": weights},
        exporter="trace",
        memory_shapes=shapes,
        moves_every=step.moves_every,
        inputs=inputs,
        outputs=outputs,
    ).completed()


@dataclass
class TracedGraphs:
    """Writes the graphs of a step, in the precisions that an export needs of it."""

    step: ModuleStep
    vocab: Vocab | None
    traces: dict[tuple[Target, MemoryType, int | None], ir.Model] = field(default_factory=dict)
    """The graphs by target, type of the memory and number of tokens, if there are several. A trace takes
    long, and the precision of the weights is applied after it.
    """

    bodies: dict[tuple[Target, MemoryType], ir.Model] = field(default_factory=dict)
    """The steps of `step_tokens` tokens from which the graphs of several are made, by target and memory."""

    def write(self, spec: Spec, folder: Path) -> dict[str, OrtSession]:
        """Traces the step, lowers its graphs to the precision of the spec, and writes them."""
        # For an engine, the graph is float32 throughout.
        whole = dataclasses.replace(spec, precision="fp32", memory_precision="fp32").completed()
        traced = whole if spec.target == "tensorrt" else spec
        graphs: list[tuple[int | None, str]] = [*spec.token_graphs.items()] or [(None, GRAPH)]
        for tokens, name in graphs:
            key = spec.target, traced.state_dtype, tokens
            if key not in self.traces:
                self.traces[key] = self._traced(traced, tokens)
            graph = self.traces[key].clone()
            if spec.target == "tensorrt":
                if spec.precision != "fp32":
                    from xl_export.graph.half import to_half

                    graph = to_half(graph, {x.name: TYPES[x.dtype] for x in (*spec.inputs, *spec.outputs)})
            elif spec.precision != "fp32":
                from xl_export.graph.quantise import BLOCK, lowered  # imports `trainer`

                graph = lowered(graph, spec.precision)
                if not self.step.language_model and spec.precision in QUANTISED and not _has_bytes(graph):
                    raise ConfigError(
                        f"the step multiplies by no constant matrix of {BLOCK} rows or more, so no weights "
                        f"would be in {spec.precision}; give fp16, or leave the precision out."
                    )
            stamp(graph, spec, self.vocab)
            if name == GRAPH:
                save_model(graph, folder)
            else:
                save_graph(graph, folder / name, weights_of=folder / GRAPH)
        return {GRAPH: OrtSession(spec, self.vocab, folder / GRAPH)}

    def _traced(self, spec: Spec, tokens: int | None) -> ir.Model:
        own = self.step.step_tokens
        if own is None or tokens is None or tokens % own:
            return traced_graph(self.step, spec, tokens)
        key = spec.target, spec.state_dtype
        if key not in self.bodies:
            self.bodies[key] = traced_body(self.step, spec)
        return several_steps(self.step, spec, tokens, self.bodies[key].clone())


def _has_bytes(graph: ir.Model) -> bool:
    return any(x.dtype in (ir.DataType.INT8, ir.DataType.UINT8) for x in graph.graph.initializers.values())
