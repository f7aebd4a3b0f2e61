"""The operator `xl_export::RelativeAttention`, which a graph for TensorRT calls for attention, and its
contract.

For a query at index i of its segment and the key of column j, at distance d = M + i - j:

    score = (q + u)·k(j) + (q + v)·r(d) + b(d)

The softmax runs over the visible keys and the persistent ones, and weights their values.

The inputs have this order. They are all of one type, float16 or float32, except `first`. Every input is
always present; it is zeros if a model lacks the term.

    query [B, H, T, K]            already divided by sqrt(K), as are u and v
    key, value [B, H, J, K]       J = M + T: the memory, then the segment itself
    first int32 [B]               stream position of each row's first query; negative for padding
    u, v [H, 1, K]                added to the query for its product with keys, and with r
    position_table [G, R, K]      r(d) in row min(d, R - 1); G = H, or 1 if all heads share the table
    bias_table [G, R]             b(d) likewise, with G and R of its own; may hold -inf
    persistent_key [H, N, K]      multiplied with the query without u, at no distance; visible to every query
    persistent_value [H, N, K]

The output is the answer [B, H, T, K]. It is zero if no key is visible to a query. Softmax statistics are
float32 for either type.

Over a ring the operator is `xl_export::RelativeAttentionInRing`. Its keys are in the slots of a ring of J = S
slots, and it has one more input:

    slot int32 [B]                the slot of each row's first query, with slot + T ≤ J

Its distances are d = (slot + i - j) mod J.

For the function body a node also has the sizes M, H and (over a ring) S as attributes `mem_len`, `heads` and
`slots`, and a last input:

    positions int64 [B, T]        the step's own input; only its shape is read

All bodies of a graph take sizes from that shape and from attributes. So distances and masks of all layers are
equal expressions, which runtimes compute once, and no size is copied from the CPU to the GPU.

Neither operator writes the memory; `xl_export::RingRelativeAttention` of the fused CPU library,
a different operator, does.

A model holds the function body below, made of standard operators. ONNX Runtime replaces the node by
the body, and so does TensorRT unless the plugin is built in. With the plugin, two nodes whose Triton kernels
are embedded in the engine replace it, over a ring too (`network.py`, `plugin.py`). `naive.py` computes
the same in NumPy, `kernels` on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from runtimes.contract.rule import MemoryRule

if TYPE_CHECKING:
    import onnx

DOMAIN = "xl_export"
NAME = "RelativeAttention"
VERSION = 1
RING_NAME = "RelativeAttentionInRing"
# The two plugins that do a node's work, one after the other.
PARTS = "RelativeAttentionParts"
JOIN = "JoinAttentionParts"
RING_PARTS = "RelativeAttentionPartsInRing"  # the first of them over a ring
INPUTS = (
    "query",
    "key",
    "value",
    "first",
    "u",
    "v",
    "position_table",
    "bias_table",
    "persistent_key",
    "persistent_value",
)
RING_INPUTS = (*INPUTS, "slot")
# Attributes of the plugins' nodes, by which the parser finds the plugins.
PLUGIN = {"plugin_namespace": DOMAIN, "plugin_version": str(VERSION)}


@dataclass(frozen=True, kw_only=True)
class Attributes:
    """The attributes of one node. All are integers and always present, which TensorRT passes reliably."""

    full_mask: int  # 1 for the mask rule `full`, 0 for `same-length`
    nearest: int  # the smallest distance that is visible to a token: 0 if a token sees itself, else 1
    initial_masked: int  # 1 if nothing precedes a text, 0 if the whole memory is visible from the first token
    persistent: int
    """Number of persistent vectors in use. The tables hold at least one, so that no tensor is empty."""

    @classmethod
    def of(cls, rule: MemoryRule, *, persistent: int = 0) -> Attributes:
        """The attributes for a memory rule."""
        return cls(
            full_mask=int(rule.window_grows),
            nearest=rule.nearest,
            initial_masked=int(rule.initial_memory == "masked"),
            persistent=persistent,
        )

    def rule(self, *, mem_len: int, segment: int) -> MemoryRule:
        """The memory rule that a node follows on keys [B, H, mem_len + segment, K]."""
        return MemoryRule(
            mem_len=mem_len,
            segment=segment,
            mask="full" if self.full_mask else "same-length",
            include_self=self.nearest == 0,
            initial_memory="masked" if self.initial_masked else "zeros",
        )


ATTRIBUTES = tuple(field.name for field in fields(Attributes))
RING_ATTRIBUTES = (*ATTRIBUTES, "mem_len")


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The operator in one form of memory: its name, the plugin that attends to parts of the keys for it, and
    the names of the inputs and attributes of the plugin, which are the node's first.
    """

    name: str
    parts: str
    inputs: tuple[str, ...]
    attributes: tuple[str, ...]


SIGNATURES = (
    Signature(name=NAME, parts=PARTS, inputs=INPUTS, attributes=ATTRIBUTES),
    Signature(name=RING_NAME, parts=RING_PARTS, inputs=RING_INPUTS, attributes=RING_ATTRIBUTES),
)


def function_body(opset: int, *, ring: bool = False, persistent: bool = True) -> onnx.FunctionProto:
    """The operator as a model-local function of standard operators, for a model of this opset.

    ring: whether it is the operator over a ring. persistent: whether nodes may have persistent vectors;
    without them the body is shorter.
    """
    import onnx  # not at the top, because `devices --try` runs kernels without it

    of = SIGNATURES[ring]
    body = _BODY.replace("SCORES", _OWN_SCORES if persistent else _SCORES)
    body = body.replace("ANSWER", _OWN_ANSWER if persistent else _ANSWER)
    body = body.replace("DISTANCES", _RING_DISTANCES if ring else _DISTANCES)
    body = body.replace("BIAS", _RING_BIAS if ring else _BIAS)
    attributes = (*RING_ATTRIBUTES, "heads", *(["slots"] if ring else []))
    inputs = (*of.inputs, "positions")
    signature = f"{of.name} <{', '.join(attributes)}> ({', '.join(inputs)}) => (answer)"
    return onnx.parser.parse_function(
        f'<domain: "{DOMAIN}", opset_import: ["" : {opset}]>\n{signature}{body}'
    )


# The distances d [T, J] of a memory followed by the segment, or d [B, 1, T, J] of the slots of a ring.
_DISTANCES = """J = Add (M, T)
    j_J = Range (zero, J, one)
    from_first_key = Add (i_T1, M)
    d = Sub (from_first_key, j_J)"""
_RING_DISTANCES = """J = Constant <value_int : int = @slots> ()
    j_J = Range (zero, J, one)
    slot_64 = Cast <to = 7> (slot)
    slot_B111 = Unsqueeze (slot_64, at_123)
    own_slot = Add (slot_B111, i_T1)
    behind = Sub (own_slot, j_J)
    of_last_turn = Less (behind, zero)
    more_behind = Add (behind, J)
    d = Where (of_last_turn, more_behind, behind)"""
_BIAS = "bias_by_key = Gather <axis = 1> (bias_table, bias_row)"
_RING_BIAS = """bias_GB1TJ = Gather <axis = 1> (bias_table, bias_row)
    at_2 = Constant <value_ints = [2]> ()
    bias_GBTJ = Squeeze (bias_GB1TJ, at_2)
    bias_by_key = Transpose <perm = [1, 0, 2, 3]> (bias_GBTJ)"""

# Scores and answer without persistent vectors, and with them.
_SCORES = "joined = Where (visible, with_bias, nothing)"
_ANSWER = "answer = MatMul (weights, value)"
_OWN_SCORES = """scores = Where (visible, with_bias, nothing)
    own_key_HKN = Transpose <perm = [0, 2, 1]> (persistent_key)
    own = MatMul (query, own_key_HKN)
    own_32 = Cast <to = 1> (own)
    N_ = Shape <start = 1, end = 2> (persistent_key)
    N = Squeeze (N_)
    n = Range (zero, N, one)
    in_use_count = Constant <value_int : int = @persistent> ()
    in_use = Less (n, in_use_count)
    own_scores = Where (in_use, own_32, nothing)
    joined = Concat <axis = 3> (own_scores, scores)"""
_OWN_ANSWER = """zero_ = Constant <value_ints = [0]> ()
    end_ = Constant <value_ints = [9223372036854775807]> ()
    last_axis = Constant <value_ints = [3]> ()
    own_weights = Slice (weights, zero_, N_, last_axis)
    context_weights = Slice (weights, N_, end_, last_axis)
    from_context = MatMul (context_weights, value)
    from_persistent = MatMul (own_weights, persistent_value)
    answer = Add (from_context, from_persistent)"""

# A softmax of minus infinity throughout is NaN, so masked scores are `lowest` in it, and 0 after it. It is a
# power of two because runtimes fuse the products and differences of a softmax: with -1e30 a row that sees
# nothing could become infinite.
_BODY = """
{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    nothing = Constant <value_float = -inf> ()
    at_0 = Constant <value_ints = [0]> ()
    at_1 = Constant <value_ints = [1]> ()
    at_123 = Constant <value_ints = [1, 2, 3]> ()
    B_ = Shape <start = 0, end = 1> (positions)
    H = Constant <value_int : int = @heads> ()
    H_ = Unsqueeze (H, at_0)
    T_ = Shape <start = 1, end = 2> (positions)
    T = Squeeze (T_)
    M = Constant <value_int : int = @mem_len> ()

    offset = Range (zero, T, one)
    i_T1 = Unsqueeze (offset, at_1)
    DISTANCES

    full = Constant <value_int : int = @full_mask> ()
    more = Mul (i_T1, full)
    window = Add (more, M)
    least = Constant <value_int : int = @nearest> ()
    not_too_near = GreaterOrEqual (d, least)
    not_too_far = LessOrEqual (d, window)
    in_window = And (not_too_near, not_too_far)
    first_64 = Cast <to = 7> (first)
    first_B111 = Unsqueeze (first_64, at_123)
    position = Add (first_B111, i_T1)
    past = Max (position, zero)
    masked_int = Constant <value_int : int = @initial_masked> ()
    masked = Cast <to = 9> (masked_int)
    any = Constant <value_int = 1099511627776> ()
    most = Where (masked, past, any)
    in_text = LessOrEqual (d, most)
    visible = And (in_window, in_text)

    content_query = Add (query, u)
    key_BHKJ = Transpose <perm = [0, 1, 3, 2]> (key)
    content = MatMul (content_query, key_BHKJ)
    content_32 = Cast <to = 1> (content)

    position_query = Add (query, v)
    table_GKR = Transpose <perm = [0, 2, 1]> (position_table)
    by_row = MatMul (position_query, table_GKR)
    R_ = Shape <start = 1, end = 2> (position_table)
    R = Squeeze (R_)
    last_row = Sub (R, one)
    row = Clip (d, zero, last_row)
    J_ = Unsqueeze (J, at_0)
    BHTJ = Concat <axis = 0> (B_, H_, T_, J_)
    row_BHTJ = Expand (row, BHTJ)
    positional = GatherElements <axis = 3> (by_row, row_BHTJ)
    positional_32 = Cast <to = 1> (positional)

    bias_R_ = Shape <start = 1, end = 2> (bias_table)
    bias_R = Squeeze (bias_R_)
    last_bias = Sub (bias_R, one)
    bias_row = Clip (d, zero, last_bias)
    BIAS
    bias_32 = Cast <to = 1> (bias_by_key)

    with_position = Add (content_32, positional_32)
    with_bias = Add (with_position, bias_32)
    SCORES
    seen = Greater (joined, nothing)
    lowest = Constant <value_float = -1.2676506002282294e30> ()
    bounded = Max (joined, lowest)
    softmax = Softmax <axis = -1> (bounded)
    none = Constant <value_float = 0.0> ()
    weights_32 = Where (seen, softmax, none)
    weights = CastLike (weights_32, value)
    ANSWER
}
"""
