"""The causal language models of Hugging Face's transformers, whose cache is bounded or is cut to a window."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from runtimes.base.errors import ConfigError, first_line, needs
from runtimes.base.ranges import Range
from runtimes.contract.memory import FAR
from xl_export.tracing.module import Sizes

RECURRENT = 64  # tokens of memory in the rule of a model whose memory has no length
NO_LIMIT = 1 << 40  # tokens
POSITIONS = "max_position_embeddings"  # by which transformers finds how many positions there are
UNSTEADY = ("dynamic", "longrope")  # rotary angles that depend on the length of the text


def from_transformers(model: Any, window: int | None = None) -> nn.Module:
    """A module for `trace` around a causal language model of transformers.

    Its memory is what the model's own `DynamicCache` holds: the states of recurrent and of convolutional
    layers, and the keys and values of the last tokens. Trace it with a rule of `mem_len=module.mem_len`.
    Rotary angles are computed in float64, so a token is as right at position 10 million as at 1,000.

    window: how many tokens a token sees in a layer of full attention, with itself, as `sliding_window` counts
    them. Layers with a wider sliding window are cut to it too. The artefact then equals the model only for
    texts of up to `window` tokens. None is for models without full attention.

    Raises ConfigError for a model whose memory grows if no window was given, for a window that changes
    nothing, for another kind of memory, and for a model that does not run token by token at any position.
    """
    with needs("transformers", "transformers"):
        import transformers  # noqa: F401
    if window is not None:
        Range(2, whole=True).check("window", window, ConfigError)
    if model.get_output_embeddings() is None:
        raise ConfigError(
            f"{type(model).__name__} has no output layer over the vocabulary; give a causal language model, "
            "as AutoModelForCausalLM loads one."
        )
    # Checks of `trace` name the class of a module: here, the one of the model.
    wrapper = type(f"from_transformers({type(model).__name__})", (_FromTransformers,), {})
    module: nn.Module = wrapper(model, window)
    return module


@dataclass(frozen=True)
class _State:
    """One memory tensor: where the cache has it, and the shape of one row."""

    layer: int
    name: str
    index: int | None  # of one state of several; None for the keys or values [H, M, K] of the last M tokens
    shape: tuple[int, ...]

    def read(self, layers: Sequence[Any]) -> Tensor:
        value = getattr(layers[self.layer], self.name)
        after: Tensor = (
            value[:, :, value.shape[2] - self.shape[1] :] if self.index is None else value[self.index]
        )
        return after

    def write(self, layers: Sequence[Any], value: Tensor) -> None:
        if self.index is None:
            setattr(layers[self.layer], self.name, value)
        else:
            getattr(layers[self.layer], self.name)[self.index] = value


class _Outputs(SimpleNamespace):
    """What a model without its output layer returns; what this lacks is None."""

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Any:
        return list(vars(self).values())[index]


class _FromTransformers(nn.Module):
    def __init__(self, model: Any, window: int | None) -> None:
        super().__init__()
        self.model = model
        config = model.config.get_text_config(decoder=True)
        _refuse_unsteady_angles(model)
        # A cache after one token: its tensors have their shapes, and its flags say that there is a memory.
        try:
            self._cache = self.original(torch.zeros(1, 1, dtype=torch.int64), None)[1][0]
        except Exception as error:  # a model with a cache of its own may raise any
            raise _unfit(model, f"does not run with a DynamicCache ({first_line(error):.100})") from error
        layers = self._cache.layers
        self._layer_types = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
        reaches = self._reaches_of(window)
        self._states = [*self._states_of(reaches)]
        self._reaches = {self._layer_types[layer]: reach for layer, reach in reaches.items()}
        if any(each.index is not None for each in self._states):
            self.step_tokens = 1  # transformers continues a recurrent state by one token
        self.mem_len = max(reaches.values(), default=RECURRENT)
        keys = next((each.shape for each in self._states if each.index is None), (1, 0, 0))
        self.sizes = Sizes(
            vocab_size=model.get_output_embeddings().weight.shape[0],
            layers=len(layers),
            d_model=config.hidden_size,
            heads=keys[0],
            head_dim=keys[2],
        )
        self._refuse_other_forward()

    @torch.no_grad()
    def _refuse_other_forward(self) -> None:
        """Raises ConfigError, before the slow trace, for a model whose forward is not what `step` expects."""
        tokens = torch.arange(2)[None]
        expected = self.original(tokens, None)[0][0]
        memory = self.start(1)
        hidden = []
        try:
            for at in range(2):
                state, memory = self.step(tokens[:, at : at + 1], torch.tensor([[at]]), memory)
                hidden.append(state[0])
            found = self.logits(torch.cat(hidden))
        except Exception as error:  # the model's own code may raise any
            raise _unfit(
                self.model, f"does not run with masks and positions per token ({first_line(error):.100})"
            ) from error
        loose = 0.01 * float(expected.abs().max())  # `trace` compares many tokens exactly
        if found.shape != expected.shape or not torch.allclose(found, expected, atol=loose, equal_nan=True):
            raise _unfit(self.model, "gives other logits step by step than for two tokens at once")
        try:
            self.step(tokens[:, :1], torch.tensor([[FAR]]), memory)
        except Exception as error:
            config = self.model.config.get_text_config(decoder=True)
            key = config.attribute_map.get(POSITIONS, POSITIONS)
            raise ConfigError(
                f"{type(self.model).__name__} has no position {FAR:,} ({first_line(error):.100}): its "
                f"positions end at {key}={getattr(config, key, None)}, and a stream does not end; give a "
                "model with rotary positions, or without positions."
            ) from error

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, *each.shape) for each in self._states]

    def step(
        self, tokens: Tensor, positions: Tensor, memory: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        cache = copy.copy(self._cache)
        cache.layers = [_copied(layer, self.mem_len) for layer in cache.layers]
        goes_on = positions[:, 0] > 0
        for state, past in zip(self._states, memory, strict=True):
            if state.index is not None:  # no mask hides the state of an earlier text
                past = torch.where(goes_on.reshape(-1, *[1] * (past.ndim - 1)), past, 0.0)
            state.write(cache.layers, past)
        with _traceable(self.model):
            answer = self.model.base_model(
                tokens,
                attention_mask=self._masks(positions),
                position_ids=positions.clamp(min=0),
                cache=cache,
                use_cache=True,
            )
        return answer.last_hidden_state, [state.read(cache.layers) for state in self._states]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, D], by what the model's own `forward` does with them."""
        given = _Outputs(last_hidden_state=hidden[None])
        with mock.patch.object(self.model.base_model, "forward", return_value=given):
            logits: Tensor = self.model(torch.zeros(1, 1, dtype=torch.int64)).logits[0]
        return logits

    def original(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The model's own loop, as `generate` runs it: a prompt at once, and then token by token.

        tokens [1, n] continue the stream of a state; None begins one.
        """
        from transformers import DynamicCache

        cache, seen = state or (DynamicCache(config=self.model.config), 0)
        answers = []
        for piece in torch.split(tokens, 1 if seen else tokens.shape[1], dim=1):
            positions = torch.arange(seen, seen + piece.shape[1])[None]
            with torch.no_grad():
                answer = self.model(piece, position_ids=positions, cache=cache, use_cache=True)
            answers.append(answer.logits)
            seen += piece.shape[1]
        return torch.cat(answers, dim=1), (cache, seen)

    def _masks(self, positions: Tensor) -> Any:
        """What is added to the scores [B, 1, T, M + T], by the type of the layer if these have several M."""
        masks = {name: _mask(positions, reach) for name, reach in self._reaches.items()}
        if len({*self._reaches.values()}) < 2:
            return next(iter(masks.values()), None)
        return dict.fromkeys(self._layer_types) | masks

    def _reaches_of(self, window: int | None) -> dict[int, int]:
        """How many tokens before its own a token sees, of each layer with attention."""
        own = {
            number: getattr(layer, "sliding_window", None) or math.inf
            for number, layer in enumerate(self._cache.layers)
            if getattr(layer, "keys", None) is not None
        }
        if window is None:
            if growing := [n for n, tokens in own.items() if tokens == math.inf]:
                listed = ", ".join(f"{n} ({self._layer_types[n]})" for n in growing[:4])
                raise ConfigError(
                    f"{type(self.model).__name__} keeps every token in layer {listed}"
                    f"{', …' if len(growing) > 4 else ''}, and a memory has a bound; give window, the number "
                    "of tokens that a token of these layers sees: the artefact equals the model for texts "
                    "of at most that length."
                )
        elif any(tokens > window for tokens in own.values()):
            self.equals_up_to = window
        else:
            raise ConfigError(
                f"No token of {type(self.model).__name__} sees more than {window:,} tokens by attention, so "
                "window would change nothing; leave it out."
            )
        return {n: int(min(tokens, window or math.inf)) - 1 for n, tokens in own.items()}

    def _states_of(self, reaches: Mapping[int, int]) -> Iterator[_State]:
        for number, layer in enumerate(self._cache.layers):
            tensors = {name: x for name, x in vars(layer).items() if isinstance(x, Tensor) and x.ndim}
            if unknown := tensors.keys() - {"keys", "values"}:
                raise _unfit(self.model, f"keeps {min(unknown)} in layer {number} of its cache")
            for name, x in tensors.items():
                yield _State(number, name, None, (x.shape[1], reaches[number], x.shape[3]))
            states = [
                _State(number, name, index, tuple(x.shape[1:]))
                for name, several in vars(layer).items()
                if isinstance(several, dict)
                for index, x in several.items()
                if isinstance(x, Tensor)
            ]
            yield from states
            if not (tensors or states or self._cache.is_dummy[number]):
                raise _unfit(self.model, f"keeps nothing of layer {number} in its cache")


def _unfit(model: nn.Module, does: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} {does}, so this adapter cannot use it; trace a module of "
        "your own that returns its memory (docs/guides/own-model.md)."
    )


def _refuse_unsteady_angles(model: nn.Module) -> None:
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind in UNSTEADY:
                raise ConfigError(
                    f"{type(model).__name__} has rotary positions of type {kind}, which depend on the length "
                    "of the text, and a stream has none; give a model with another rope_type."
                )


def _copied(layer: Any, length: int) -> Any:
    """A cache layer whose tensors can be replaced, with `length` tokens behind it."""
    copied = copy.copy(layer)
    vars(copied).update({name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)})
    if hasattr(layer, "cumulative_length"):
        copied.cumulative_length = length
    if hasattr(layer, "sliding_window"):
        copied.sliding_window = NO_LIMIT  # `_State.read` cuts, at a place that does not depend on the segment
    return copied


def _mask(positions: Tensor, reach: int) -> Tensor:
    """0 where a token [B, 1, T, reach + T] is seen, and otherwise minus infinity."""
    T = positions.shape[1]
    distance = torch.arange(T)[:, None] + reach - torch.arange(reach + T)
    furthest = positions.clamp(min=0, max=reach)[:, :, None]  # padding sees itself, for it must see something
    return torch.where((distance >= 0) & (distance <= furthest), 0.0, float("-inf"))[:, None]


class _InWholeHeads(TorchFunctionMode):
    """Writes out the one head of keys and values that attention would broadcast, which torch.onnx refuses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            query, *pair = args[:3]
            heads = query.shape[1]
            args = (query, *(x.expand(-1, heads, -1, -1) if x.shape[1] == 1 else x for x in pair), *args[3:])
        return func(*args, **(kwargs or {}))


class _InFloat64(TorchFunctionMode):
    """Computes in float64 what asks for float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = Tensor.double if func is Tensor.float else func
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


@contextmanager
def _traceable(model: nn.Module) -> Iterator[None]:
    """While the block runs, rotary angles are in float64, for float32 has no room for position 10 million,
    and experts are multiplied by operators that ONNX has.
    """
    with ExitStack() as patches:
        patches.enter_context(_InWholeHeads())
        for module in model.modules():
            if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
                patches.enter_context(mock.patch.object(module, "forward", _exact(module.forward)))
            settings = vars(module.config) if hasattr(module, "config") else {}
            if "_experts_implementation_internal" in settings:
                patches.enter_context(
                    mock.patch.dict(settings, {"_experts_implementation_internal": "batched_mm"})
                )
        yield


def _exact(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: Tensor, *others: Any, **named: Any) -> Any:
        with _InFloat64():
            answer = forward(x.double(), *others, **named)
        return tuple(each.to(x.dtype) for each in answer)

    return call
