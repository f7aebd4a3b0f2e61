// The custom operators of the domain xl_export for ONNX Runtime: relative attention over a ring memory.
//
// RingRelativeAttention keeps its ring in floats, RingRelativeAttentionOverHalves in half precision. The type
// is part of the name because ONNX Runtime wants a declared type for each output. Both are also registered
// under the names that artefacts exported with version 0.1 use: RelativeAttention and
// RelativeAttentionOverHalves.
//
// Shapes: B batch rows, T tokens of the segment, h heads, K head width, S slots of the ring, R table rows.
//
// inputs   0 query      float [B, T, …]  a token's row holds the queries of all heads, from column `query_at`
//          1 context    float [B, T, …]  likewise its new keys from `key_at` and its values from `value_at`
//          2 keys       [B, h, S, K]     the ring, in floats or halves
//          3 values     [B, h, S, K]     the same; without 2 and 3 the segment attends to itself alone
//          4 table      [h, K, R]        optional: r(d) by distance, in floats or halves; distances of R and
//                                        more use the last row; the operator asks the tensor for its type
//          5 positions  int64 [B, T]     of the tokens; those of one row are consecutive
//          6 u, 7 v     float [h, 1, K]  optional
//          8 bias       float [h, 1, R]  optional
// outputs  0 answers    float [B, T, h·K]
//          1 keys       [B, h, S, K]     the ring with the new tokens, bound to the same buffer as input 2
//          2 values     [B, h, S, K]     the same for input 3
// attributes: heads, head_dim, mem_len, nearest, full, query_at, key_at, value_at

#include <exception>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention.hpp"
#include "vendor/onnxruntime/onnxruntime_c_api.h"

namespace {

constexpr int64_t LARGEST_SIZE = 1 << 24;  // of any dimension, so that no product of two overflows

/// Carries a status of ONNX Runtime up to the function that hands it back.
struct Failure {
  OrtStatus* status;
};

template <class Stored>
constexpr bool IN_FLOATS = std::is_same_v<Stored, float>;
template <class Stored>
constexpr ONNXTensorElementDataType TYPE_OF =
    IN_FLOATS<Stored> ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;

using Sizes = std::vector<int64_t>;

struct Tensor {
  void* data = nullptr;  // null for an optional input that the graph leaves out
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  Sizes sizes;
  const float* floats() const { return static_cast<const float*>(data); }
};

/// One node of the graph: its attributes, and the work of a step.
template <class Stored>
struct Node {
  Node(const OrtApi& ort, const OrtKernelInfo* info) : ort(ort) {
    int64_t full = 0;
    for (auto [name, to] : {std::pair<const char*, int64_t*>{"heads", &heads},
                            {"mem_len", &rule.mem_len},
                            {"nearest", &rule.nearest},
                            {"full", &full},
                            {"query_at", &query_at},
                            {"key_at", &key_at},
                            {"value_at", &value_at},
                            {"head_dim", &head_dim}})
      check(ort.KernelInfoGetAttribute_int64(info, name, to));
    rule.full = full != 0;
    for (int64_t x : {heads, rule.mem_len, rule.nearest, query_at, key_at, value_at, head_dim})
      expect(0 <= x && x <= LARGEST_SIZE);
    expect(heads > 0);
  }

  void compute(OrtKernelContext* context) const {
    const Call call = checked(context);
    const int64_t heads_and_rows = heads * call.batch, blocks = (call.length + xl::BLOCK - 1) / xl::BLOCK;
    // With several blocks of queries, several tasks read one head's ring: it must be complete before they
    // start. With one block, the task that reads a head's ring writes it too, while it is in that core's
    // cache.
    if (call.ring[0] && blocks > 1)
      parallel(context, heads_and_rows, [&](int64_t i) { write(call, i % call.batch, i / call.batch); });
    parallel(context, heads_and_rows * blocks, [&](int64_t i) {
      static thread_local xl::Scratch scratch;
      const int64_t b = i % call.batch, h = i / call.batch % heads, first = i / heads_and_rows * xl::BLOCK;
      if (call.ring[0] && blocks == 1) write(call, b, h);
      xl::attend(head_of(call, b, h), rule, first, std::min<int64_t>(xl::BLOCK, call.length - first),
                 scratch);
    });
  }

  const OrtApi& ort;

 private:
  int64_t heads = 0, head_dim = 0, query_at = 0, key_at = 0, value_at = 0;
  xl::Rule rule{};

  /// The inputs and outputs of one step, whose sizes fit together.
  struct Call {
    Tensor query, context, past[2], table, positions, u, v, bias;  // past: keys and values
    int64_t batch = 0, length = 0, slots = 0, rows = 0, query_pitch = 0, context_pitch = 0;
    float* answers = nullptr;
    Stored* ring[2] = {};  // keys and values; null where the segment attends to itself alone
  };

  /// Reads a step's tensors and checks every size that is later used as an offset.
  Call checked(OrtKernelContext* context) const {
    Call call{input(context, 0, 3), input(context, 1, 3), {input(context, 2, 4), input(context, 3, 4)},
              input(context, 4, 3), input(context, 5, 2), input(context, 6, 3),
              input(context, 7, 3), input(context, 8, 3)};
    const Tensor &keys = call.past[0], &table = call.table;
    const int64_t batch = call.batch = call.query.sizes[0], length = call.length = call.query.sizes[1];
    const int64_t slots = call.slots = keys.data ? keys.sizes[2] : length;
    const int64_t rows = call.rows = table.data ? table.sizes[2] : 1;
    call.query_pitch = call.query.sizes[2], call.context_pitch = call.context.sizes[2];
    expect(head_dim > 0);
    expect(call.past[1].sizes == keys.sizes);
    expect(keys.data || IN_FLOATS<Stored>);
    expect(!keys.data || keys.sizes == Sizes({batch, heads, slots, head_dim}));
    expect(!table.data || table.type == TYPE_OF<float> || table.type == TYPE_OF<xl::half>);
    expect(table.data ? table.sizes == Sizes({heads, head_dim, rows}) : !call.bias.data);
    expect(call.context.sizes[0] == batch && call.context.sizes[1] == length);
    expect(call.positions.sizes == Sizes({batch, length}));
    expect((keys.data ? rule.mem_len : 0) + length <= slots);
    expect(query_at + heads * head_dim <= call.query_pitch);
    expect(std::max(key_at, value_at) + heads * head_dim <= call.context_pitch);
    for (const Tensor* optional : {&call.u, &call.v})
      expect(!optional->data || optional->sizes == Sizes({heads, 1, head_dim}));
    expect(!call.bias.data || call.bias.sizes == Sizes({heads, 1, rows}));
    call.answers = static_cast<float*>(output(context, 0, {batch, length, heads * head_dim}));
    for (int side = 0; side < 2; ++side)
      call.ring[side] = keys.data ? static_cast<Stored*>(output(context, 1 + side, keys.sizes)) : nullptr;
    return call;
  }

  /// Head h of row b of the batch, as attention reads it.
  xl::Head<Stored> head_of(const Call& call, int64_t b, int64_t h) const {
    const int64_t width = head_dim, ring = (b * heads + h) * call.slots * width;
    const float* segment = call.context.floats() + b * call.length * call.context_pitch + h * width;
    xl::Head<Stored> head{};
    head.query = call.query.floats() + b * call.length * call.query_pitch + query_at + h * width;
    head.u = call.u.data ? call.u.floats() + h * width : nullptr;
    head.v = call.v.data ? call.v.floats() + h * width : nullptr;
    if (call.ring[0]) head.keys = call.ring[0] + ring, head.values = call.ring[1] + ring;
    else if constexpr (IN_FLOATS<Stored>) head.keys = segment + key_at, head.values = segment + value_at;
    const int64_t earlier_heads = h * call.rows * width;
    if (call.table.type == TYPE_OF<float>) head.table = call.table.floats() + earlier_heads;
    if (call.table.type == TYPE_OF<xl::half>)
      head.half_table = static_cast<const xl::half*>(call.table.data) + earlier_heads;
    head.bias = call.bias.data ? call.bias.floats() + h * call.rows : nullptr;
    head.out = call.answers + b * call.length * heads * width + h * width;
    head.query_pitch = call.query_pitch, head.out_pitch = heads * width;
    head.ring_pitch = call.ring[0] ? width : call.context_pitch;
    head.width = width, head.slots = call.slots, head.rows = call.rows, head.length = call.length;
    head.position = call.ring[0] ? static_cast<const int64_t*>(call.positions.data)[b * call.length] : 0;
    return head;
  }

  /// Writes a head's new keys and values into its ring.
  void write(const Call& call, int64_t b, int64_t h) const {
    const int64_t width = head_dim, ring_size = call.slots * width;
    const xl::Head<Stored> head = head_of(call, b, h);
    for (int side = 0; side < 2; ++side) {
      Stored* present = call.ring[side] + (b * heads + h) * ring_size;
      const Stored* past = static_cast<const Stored*>(call.past[side].data) + (b * heads + h) * ring_size;
      const float* fresh = call.context.floats() + b * call.length * call.context_pitch;
      fresh += (side ? value_at : key_at) + h * width;
      if (present != past) std::memcpy(present, past, ring_size * sizeof(Stored));  // not bound in place
      for (int64_t t = 0; t < call.length; ++t)
        xl::copy(fresh + t * call.context_pitch, width, present + head.slot(t) * width);
    }
  }

  void check(OrtStatus* status) const {
    if (status) throw Failure{status};
  }

  void expect(bool holds) const {
    constexpr const char* message =
        "the shapes and attributes given to RingRelativeAttention do not fit together";
    if (!holds) throw Failure{ort.CreateStatus(ORT_INVALID_ARGUMENT, message)};
  }

  /// Input `index`, which must have `rank` dimensions; a Tensor without data where the graph leaves it out.
  Tensor input(const OrtKernelContext* context, size_t index, size_t rank) const {
    const OrtValue* value = nullptr;
    Tensor tensor;
    check(ort.KernelContext_GetInput(context, index, &value));
    if (!value) return tensor;
    OrtTensorTypeAndShapeInfo* shape = nullptr;
    size_t actual_rank = 0;
    check(ort.GetTensorTypeAndShape(value, &shape));
    // The shape is released before a failure of any of these calls is thrown.
    OrtStatus* status = ort.GetDimensionsCount(shape, &actual_rank);
    if (!status) status = ort.GetTensorElementType(shape, &tensor.type);
    tensor.sizes.resize(actual_rank);
    if (!status) status = ort.GetDimensions(shape, tensor.sizes.data(), actual_rank);
    ort.ReleaseTensorTypeAndShapeInfo(shape);
    check(status);
    expect(actual_rank == rank);
    // An empty tensor has no data and would be taken for one that the graph leaves out, so it is refused.
    for (int64_t size : tensor.sizes) expect(0 < size && size <= LARGEST_SIZE);
    check(ort.GetTensorMutableData(const_cast<OrtValue*>(value), &tensor.data));
    return tensor;
  }

  void* output(OrtKernelContext* context, size_t index, const Sizes& sizes) const {
    OrtValue* value = nullptr;
    void* data = nullptr;
    check(ort.KernelContext_GetOutput(context, index, sizes.data(), sizes.size(), &value));
    expect(value);  // a graph may leave an optional output out, but this one is written
    check(ort.GetTensorMutableData(value, &data));
    return data;
  }

  /// Calls work(0) … work(count - 1) on the threads of the session.
  template <class Work>
  void parallel(const OrtKernelContext* context, int64_t count, const Work& work) const {
    struct Job {
      const Work& work;
      bool out_of_memory;
    } job{work, false};
    // An exception must not leave the task: ONNX Runtime calls it as a C function.
    auto task = [](void* data, size_t i) {
      Job& own = *static_cast<Job*>(data);
      try {
        own.work(static_cast<int64_t>(i));
      } catch (const std::bad_alloc&) {
        own.out_of_memory = true;
      }
    };
    check(ort.KernelContext_ParallelFor(context, task, count, 0, &job));
    if (job.out_of_memory) throw std::bad_alloc();
  }
};

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
    return i == 2 || i == 3 ? TYPE_OF<Stored>
           : i == 4         ? ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED  // any type: the node checks it
           : i == 5         ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64
                            : TYPE_OF<float>;
  };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 9; };
  op.GetOutputType = [](const OrtCustomOp*, size_t i) { return i > 0 ? TYPE_OF<Stored> : TYPE_OF<float>; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 3; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) {
    return i == 2 || i == 3 || i == 4 || i >= 6 ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
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
    // The names of version 0.1: artefacts that were exported with it must still load.
    described<float>("RelativeAttention"),
    described<xl::half>("RelativeAttentionOverHalves"),
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
