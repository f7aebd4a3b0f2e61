"""`xl::RelativeAttention`: the one operator that a TensorRT graph calls for attention, and its contract.

For a query at index i of its segment and the key of column j, at distance d = M + i - j:

    score = (q + u)·k(j) + (q + v)·r(d) + b(d)        softmax over visible keys and persistent ones, then values

Inputs in order, all of one type, float16 or float32, but for `first`; every one is always given (neutral: zeros):

    query [B, H, T, K]            over sqrt(K) already, as u and v
    key, value [B, H, J, K]       J = M + T: the memory, then the segment itself
    first int32 [B]               stream position of each row's first query; negative: padding
    u, v [H, 1, K]                added to the query where it meets keys, and where it meets r
    position_table [G, R, K]      r(d) in row min(d, R - 1); G = H, or 1 where all heads share it
    bias_table [G, R]             b(d) likewise, with its own G and R; may hold -inf
    persistent_key [H, N, K]      met by the query without u, at no distance; seen by every query
    persistent_value [H, N, K]

Output: answer [B, H, T, K]; zero where a query sees nothing. Softmax statistics are float32 whatever the type.

The model holds the function body below, made of standard operators: TensorRT and ONNX Runtime put it in place of the node. A
build with the plugin puts two nodes there, whose kernels are embedded in the engine (`network.py`, `plugin.py`). `naive.py` is
the same in PyTorch, `kernel.py` on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import onnx

from runtimes.contract.rule import MemoryRule

DOMAIN, NAME, VERSION = "xl", "RelativeAttention", 1
PARTS, JOIN = (
    "RelativeAttentionParts",
    "JoinAttentionParts",
)  # the plugins that do a node's work one after the other
INPUTS = (
    "query", "key", "value", "first", "u", "v", "position_table", "bias_table", "persistent_key", "persistent_value",
)  # fmt: skip
PLUGIN = {
    "plugin_namespace": DOMAIN,
    "plugin_version": str(VERSION),
}  # attributes of their nodes, for the parser


@dataclass(frozen=True, kw_only=True)
class Attributes:
    """The attributes of one node: integers, all of them always present, since a plugin takes nothing else without traps.

    full_mask: 1 for the `full` mask rule, 0 for `same-length`. nearest: smallest distance that a token sees. initial_masked: 1
    where nothing precedes a text, 0 where all of the memory is seen from the first token on. persistent: vectors in use, from
    the first; the tables hold at least one, so that no tensor is empty.
    """

    full_mask: int
    nearest: int
    initial_masked: int
    persistent: int

    @classmethod
    def of(cls, rule: MemoryRule, *, persistent: int = 0) -> Attributes:
        return cls(
            full_mask=int(rule.mask == "full"), nearest=rule.nearest,
            initial_masked=int(rule.initial_memory == "masked"), persistent=persistent,
        )  # fmt: skip

    def rule(self, *, mem_len: int, segment: int) -> MemoryRule:
        """The memory rule that a node follows on keys [B, H, mem_len + segment, K]."""
        return MemoryRule(
            mem_len=mem_len, segment=segment, mask="full" if self.full_mask else "same-length",
            include_self=self.nearest == 0, initial_memory="masked" if self.initial_masked else "zeros",
        )  # fmt: skip


ATTRIBUTES = tuple(field.name for field in fields(Attributes))


def function_body(opset: int) -> onnx.FunctionProto:
    """The operator as a model-local function of standard operators, for a model of this opset."""
    return onnx.parser.parse_function(f'<domain: "{DOMAIN}", opset_import: ["" : {opset}]>\n{_BODY}')


_BODY = """
RelativeAttention <full_mask, nearest, initial_masked, persistent>
    (query, key, value, first, u, v, position_table, bias_table, persistent_key, persistent_value) => (answer)
{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    nothing = Constant <value_float = -inf> ()
    T_ = Shape <start = 2, end = 3> (query)
    J_ = Shape <start = 2, end = 3> (key)
    T = Squeeze (T_)
    J = Squeeze (J_)
    M = Sub (J, T)

    offset = Range (zero, T, one)
    at_1 = Constant <value_ints = [1]> ()
    i_T1 = Unsqueeze (offset, at_1)
    j_J = Range (zero, J, one)
    from_first_key = Add (i_T1, M)
    d_TJ = Sub (from_first_key, j_J)

    full = Constant <value_int : int = @full_mask> ()
    more = Mul (i_T1, full)
    window = Add (more, M)
    least = Constant <value_int : int = @nearest> ()
    not_too_near = GreaterOrEqual (d_TJ, least)
    not_too_far = LessOrEqual (d_TJ, window)
    in_window = And (not_too_near, not_too_far)
    at_123 = Constant <value_ints = [1, 2, 3]> ()
    first_64 = Cast <to = 7> (first)
    first_B111 = Unsqueeze (first_64, at_123)
    position = Add (first_B111, i_T1)
    past = Max (position, zero)
    masked_int = Constant <value_int : int = @initial_masked> ()
    masked = Cast <to = 9> (masked_int)
    most = Where (masked, past, J)
    in_text = LessOrEqual (d_TJ, most)
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
    row_TJ = Clip (d_TJ, zero, last_row)
    BHT = Shape <start = 0, end = 3> (query)
    BHTJ = Concat <axis = 0> (BHT, J_)
    row_BHTJ = Expand (row_TJ, BHTJ)
    positional = GatherElements <axis = 3> (by_row, row_BHTJ)
    positional_32 = Cast <to = 1> (positional)

    bias_R_ = Shape <start = 1, end = 2> (bias_table)
    bias_R = Squeeze (bias_R_)
    last_bias = Sub (bias_R, one)
    bias_row = Clip (d_TJ, zero, last_bias)
    bias_GTJ = Gather <axis = 1> (bias_table, bias_row)
    bias_32 = Cast <to = 1> (bias_GTJ)

    with_position = Add (content_32, positional_32)
    with_bias = Add (with_position, bias_32)
    scores = Where (visible, with_bias, nothing)

    own_key_HKN = Transpose <perm = [0, 2, 1]> (persistent_key)
    own = MatMul (query, own_key_HKN)
    own_32 = Cast <to = 1> (own)
    N_ = Shape <start = 1, end = 2> (persistent_key)
    N = Squeeze (N_)
    n = Range (zero, N, one)
    in_use_count = Constant <value_int : int = @persistent> ()
    in_use = Less (n, in_use_count)
    own_scores = Where (in_use, own_32, nothing)

    joined = Concat <axis = 3> (own_scores, scores)
    last_axis = Constant <value_ints = [3]> ()
    highest = ReduceMax (joined, last_axis)
    lowest = Constant <value_float = -1.0e30> ()
    peak = Max (highest, lowest)
    below_peak = Sub (joined, peak)
    raised = Exp (below_peak)
    sum = ReduceSum (raised, last_axis)
    one_32 = Constant <value_float = 1.0> ()
    total = Max (sum, one_32)
    weights_32 = Div (raised, total)
    weights = CastLike (weights_32, value)
    zero_ = Constant <value_ints = [0]> ()
    end_ = Constant <value_ints = [9223372036854775807]> ()
    own_weights = Slice (weights, zero_, N_, last_axis)
    context_weights = Slice (weights, N_, end_, last_axis)
    from_context = MatMul (context_weights, value)
    from_persistent = MatMul (own_weights, persistent_value)
    answer = Add (from_context, from_persistent)
}
"""
