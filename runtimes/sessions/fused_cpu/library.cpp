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
//          3 values     [B, h, S, K]     the same; without 2 and 3 the segment attends only to itself
//          4 table      [h, K, R]        r(d) by distance, in floats, halves or bytes; distances of R and
//                                        more use the last row; the operator asks the tensor for its type
//          5 positions  int64 [B, T]     of the tokens; consecutive in each row
//          6 u, 7 v     float [h, 1, K]
//          8 bias       float [h, 1, R]  is added to the scores
//          9, 10        float [h, 1, K]  the key and the value of every token before the stream, which are
//                                        attended to; without them nothing before the stream is seen
//         11 gate       float [h, 1, R]  m(d), which multiplies the weights after the softmax; see `epsilon`
//         12            float [h, 1, R]  the scales of a table of bytes
//         13            [h, K, N]        persistent keys, in floats, halves or bytes
//         14            [h, N, K]        persistent values, likewise
//         15, 16        float [h, 1, N] and [h, N, 1]  their scales, if they are bytes
//         17, 18        float [B, h, S, 1]  the scales of the ring's keys and of its values, if they are
//                                        bytes; the other operators have no such inputs
// outputs  0 answers    float [B, T, h·K]
//          1 keys       [B, h, S, K]     the ring with the new tokens, bound to the same buffer as input 2
//          2 values     [B, h, S, K]     the same for input 3
//          3, 4 scales  float [B, h, S, 1]  the same for inputs 17 and 18
// attributes: heads, head_dim, mem_len, nearest, full, query_at, key_at, value_at; float epsilon, with a gate
//
// RingRelativeAttentionOnCuda and ProductOnCuda are operators of the CUDA provider (`operator.hpp` and `product.hpp` in
// `../ort_gpu/`).
//
// RingRelativeLayer, RingRelativeLayerOverHalves and RingRelativeLayerOverBytes compute a whole layer around it.
// D is the width of the model, and F the width of the feed-forward network. Inputs 2 to 18 are as above; also
//
//          0 x          float [B, T, D]
//          1 matrix     [D, …]           gives query and context; 19, 20 are its scales and zero points
//         21 matrix     [h·K, D]         of the answers; 22, 23 are its scales and zero points
//         24, 25        float [D]        weight and bias of attention's norm
//         26 matrix     [D, F]           27, 28 are its scales and zero points, and 29 its bias [F]
//         30 matrix     [F, D]           31, 32 are its scales and zero points, and 33 its bias [D]
//         34, 35        float [D]        weight and bias of the feed-forward network's norm
// output   0 y          float [B, T, D]
// attributes: also pre_norm, and float norm_epsilon. A layer without inputs 26 to 35 ends after attention.
// The activation of the feed-forward network is ReLU.
//
// ConstantProduct computes y [.., N] = x [.., K] · W + bias. Its inputs are x, the matrix, its scales, its zero
// points and the bias. Its attribute `turned` says whether the matrix is [N, K].
//
// ConstantRows looks up rows of a table [V, D]: x float [B, T, D] = factor · table[ids int64 [B, T]]. Its inputs are
// ids, the table, its scales and its zero points; its attributes are width, which is D, and float factor.
//
// Matrices are constants of the graph: floats, int8 with a scale for each column, or blocks of uint8 as
// MatMulNBits reads them.

#ifdef XL_EXPORT_BUILT_IN  // into a program, as one of several variants and without CUDA: see dispatch.cpp
#define EXPORTED
#else
#define EXPORTED __attribute__((visibility("default")))
#include "../ort_gpu/product.hpp"
#endif
#include "layer.hpp"
#include "softmax.hpp"

namespace {

using xl::Failure;
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

/// The operator whose nodes are of a class.
template <class Node>
Operator described(const char* operator_name) {
  Operator op{};
  op.operator_name = operator_name;
  op.version = ORT_API_VERSION;
  op.GetName = [](const OrtCustomOp* self) { return static_cast<const Operator*>(self)->operator_name; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  op.GetInputType = [](const OrtCustomOp*, size_t i) {
    if (Node::has_any_type(i)) return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;  // the node checks it
    return 2 <= i && i <= 4 ? TYPE_OF<typename Node::Ring>
           : i == 5         ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64
                            : Node::VALUES;
  };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return Node::INPUTS; };
  op.GetOutputType = [](const OrtCustomOp*, size_t i) {
    return i == 1 || i == 2 ? TYPE_OF<typename Node::Ring> : Node::VALUES;
  };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return Node::OUTPUTS; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) {
    return i < 2 || (i == 5 && Node::OUTPUTS > 2) ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t i) {
    return i > 0 ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
  op.GetVariadicInputMinArity = op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
  op.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi* ort, const OrtKernelInfo* info, void** node) {
    return guarded(*ort, [&] { *node = new Node(*ort, info); });
  };
  op.KernelComputeV2 = [](void* data, OrtKernelContext* context) {
    const Node& node = *static_cast<Node*>(data);
    return guarded(node.ort, [&] { node.compute(context); });
  };
  op.KernelDestroy = [](void* data) { delete static_cast<Node*>(data); };
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return INT32_MAX; };
  return op;
}

#ifndef XL_EXPORT_BUILT_IN
/// The same for nodes of the CUDA provider.
template <class Node>
Operator on_cuda(const char* operator_name) {
  Operator op = described<Node>(operator_name);
  op.GetExecutionProviderType = [](const OrtCustomOp*) { return "CUDAExecutionProvider"; };
  return op;
}
#endif

/// All operators. They are not made when the program starts: this may be a variant for another processor.
const auto& operators() {
  static const Operator all[] = {
      described<xl::Attention<float>>("RingRelativeAttention"),
      described<xl::Attention<xl::half>>("RingRelativeAttentionOverHalves"),
      described<xl::Attention<int8_t>>("RingRelativeAttentionOverBytes"),
      described<xl::Layer<float>>("RingRelativeLayer"),
      described<xl::Layer<xl::half>>("RingRelativeLayerOverHalves"),
      described<xl::Layer<int8_t>>("RingRelativeLayerOverBytes"),
      described<xl::Product>("ConstantProduct"),
      described<xl::Rows>("ConstantRows"),
#ifndef XL_EXPORT_BUILT_IN
      on_cuda<xl::CudaAttention<float, float>>("RingRelativeAttentionOnCuda"),
      on_cuda<xl::CudaAttention<float, xl::half>>("RingRelativeAttentionOnCudaOverHalves"),
      on_cuda<xl::CudaAttention<xl::half, xl::half>>("RingRelativeAttentionOnCudaInHalves"),
      on_cuda<xl::CudaProduct<float>>("ProductOnCuda"),
      on_cuda<xl::CudaProduct<xl::half>>("ProductOnCudaInHalves"),
#endif
  };
  return all;
}

}  // namespace

/// The function that ONNX Runtime looks up in a library of custom operators.
extern "C" EXPORTED OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* ort = base->GetApi(ORT_API_VERSION);
  if (!ort)  // version 1 of the interface is in every release, and its table begins as this one does
    return base->GetApi(1)->CreateStatus(ORT_NOT_IMPLEMENTED,
                                         "the fused operator needs ONNX Runtime 1.21 or newer");
  static OrtCustomOpDomain* domain = nullptr;  // lives as long as the library, as ONNX Runtime asks
  if (!domain) {
    OrtCustomOpDomain* created = nullptr;
    if (OrtStatus* status = ort->CreateCustomOpDomain("xl_export", &created)) return status;
    for (const Operator& op : operators())
      if (OrtStatus* status = ort->CustomOpDomain_Add(created, &op)) return status;
    domain = created;
  }
  return ort->AddCustomOpDomain(options, domain);
}

/// Called by sessions, not by ONNX Runtime; see `softmax.hpp`.
extern "C" EXPORTED void xl_export_log_probabilities(const float* logits, int64_t rows, int64_t size,
                                                     const int64_t* targets, float* out) {
  xl::log_probabilities(logits, rows, size, targets, out);
}
