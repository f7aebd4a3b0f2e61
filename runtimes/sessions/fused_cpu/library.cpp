// The custom operators of the domain xl_export for ONNX Runtime: relative attention over a ring memory.
//
// RingRelativeAttention keeps its ring in floats, RingRelativeAttentionOverHalves in half precision, and
// RingRelativeAttentionOverBytes in bytes, with a scale for each slot of a head. The type is part of the name
// because ONNX Runtime wants a declared type for each output.
//
// Shapes: B batch rows, T tokens of the segment, h heads, K head width, S slots of the ring, R table rows, N
// persistent vectors. The inputs 2, 3, 4 and those from 6 on are optional.
//
// inputs   0 query      float [B, T, …]  a token's row holds the queries of all heads, from column `query_at`
//          1 context    float [B, T, …]  likewise its new keys from `key_at` and its values from `value_at`
//          2 keys       [B, h, S, K]     the ring, in floats, halves or bytes
//          3 values     [B, h, S, K]     the same; without 2 and 3 the segment attends to itself alone
//          4 table      [h, K, R]        r(d) by distance, in floats, halves or bytes; distances of R and
//                                        more use the last row; the operator asks the tensor for its type
//          5 positions  int64 [B, T]     of the tokens; those of one row are consecutive
//          6 u, 7 v     float [h, 1, K]
//          8 bias       float [h, 1, R]  is added to the scores
//          9, 10        float [h, 1, K]  the key and the value of every token before the stream, which are
//                                        attended to; without them nothing before the stream is seen
//         11 gate       float [h, 1, R]  m(d), which multiplies the weights after the softmax; see `epsilon`
//         12            float [h, 1, R]  the scales of a table of bytes
//         13            [h, K, N]        persistent keys, in floats, halves or bytes
//         14            [h, N, K]        persistent values, likewise
//         15, 16        float [h, 1, N] and [h, N, 1]  their scales, where they are bytes
//         17, 18        float [B, h, S, 1]  the scales of the ring's keys and of its values, where they are
//                                        bytes; the other operators have no such inputs
// outputs  0 answers    float [B, T, h·K]
//          1 keys       [B, h, S, K]     the ring with the new tokens, bound to the same buffer as input 2
//          2 values     [B, h, S, K]     the same for input 3
//          3, 4 scales  float [B, h, S, 1]  the same for inputs 17 and 18
// attributes: heads, head_dim, mem_len, nearest, full, query_at, key_at, value_at; float epsilon, with a gate

#include "node.hpp"

namespace {

using xl::Failure;
using xl::IN_BYTES;
using xl::Node;
using xl::TYPE_OF;

/// Runs work() and turns what it throws into a status of ONNX Runtime.
template <class Work>
OrtStatus* guarded(const OrtApi& ort, const Work& work) {
  try {
    work();
    return nullptr;
  } catch (const Failure& failure) {
    return failure.status;
  } catch (const std::exception& error) {
    return ort.CreateStatus(ORT_NOT_IMPLEMENTED, error.what());
  }
}

struct Operator : OrtCustomOp {
  const char* operator_name = nullptr;
};

template <class Stored>
Operator described(const char* operator_name) {
  Operator op{};
  op.operator_name = operator_name;
  op.version = ORT_API_VERSION;
  op.GetName = [](const OrtCustomOp* self) { return static_cast<const Operator*>(self)->operator_name; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  op.GetInputType = [](const OrtCustomOp*, size_t i) {
    if (i == 4 || i == 13 || i == 14)
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;  // any type: the node checks it
    return i == 2 || i == 3 ? TYPE_OF<Stored> : i == 5 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 : TYPE_OF<float>;
  };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return IN_BYTES<Stored> ? 19 : 17; };
  op.GetOutputType = [](const OrtCustomOp*, size_t i) {
    return i == 1 || i == 2 ? TYPE_OF<Stored> : TYPE_OF<float>;
  };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return IN_BYTES<Stored> ? 5 : 3; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) {
    return i < 2 || i == 5 ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t i) {
    return i > 0 ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
  op.GetVariadicInputMinArity = op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
  op.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi* ort, const OrtKernelInfo* info, void** node) {
    return guarded(*ort, [&] { *node = new Node<Stored>(*ort, info); });
  };
  op.KernelComputeV2 = [](void* data, OrtKernelContext* context) {
    const Node<Stored>& node = *static_cast<Node<Stored>*>(data);
    return guarded(node.ort, [&] { node.compute(context); });
  };
  op.KernelDestroy = [](void* data) { delete static_cast<Node<Stored>*>(data); };
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return INT32_MAX; };
  return op;
}

const Operator OPERATORS[] = {
    described<float>("RingRelativeAttention"),
    described<xl::half>("RingRelativeAttentionOverHalves"),
    described<int8_t>("RingRelativeAttentionOverBytes"),
};

}  // namespace

/// The function that ONNX Runtime looks up in a library of custom operators.
extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                               const OrtApiBase* base) {
  const OrtApi* ort = base->GetApi(ORT_API_VERSION);
  if (!ort)  // version 1 of the interface is in every release, and its table begins as this one does
    return base->GetApi(1)->CreateStatus(ORT_NOT_IMPLEMENTED,
                                         "the fused operator needs ONNX Runtime 1.21 or newer");
  static OrtCustomOpDomain* domain = nullptr;  // lives as long as the library, as ONNX Runtime asks
  if (!domain) {
    OrtCustomOpDomain* created = nullptr;
    if (OrtStatus* status = ort->CreateCustomOpDomain("xl_export", &created)) return status;
    for (const Operator& op : OPERATORS)
      if (OrtStatus* status = ort->CustomOpDomain_Add(created, &op)) return status;
    domain = created;
  }
  return ort->AddCustomOpDomain(options, domain);
}
