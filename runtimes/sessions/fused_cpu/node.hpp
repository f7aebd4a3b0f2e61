// Nodes of the operators in ONNX Runtime: they check what they are given, and work on the session's threads.
#pragma once

#include <atomic>
#include <exception>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention.hpp"
#include "load.hpp"
#include "matrix.hpp"
#include "vendor/onnxruntime/onnxruntime_c_api.h"

namespace xl {

constexpr int64_t LARGEST_SIZE = 1 << 24;  // of any dimension, so that no product of two overflows
// Multiply-adds that are worth a thread of their own: 2 to 4 µs of one core.
constexpr int64_t WORTH_A_THREAD = 1 << 14;
constexpr int64_t MIN_TASKS = 32;  // keep the threads of most processors busy

constexpr size_t ANY_RANK = 0;
constexpr size_t NO_INPUT = SIZE_MAX;

/// What follows a product.
enum class Activation { NONE, RELU };

/// Carries a status of ONNX Runtime up to the function that hands it back.
struct Failure {
  OrtStatus* status;
};

template <class Stored>
constexpr bool IN_FLOATS = std::is_same_v<Stored, float>;
template <class Stored>
constexpr bool IN_BYTES = std::is_same_v<Stored, int8_t>;
template <class Stored>
constexpr ONNXTensorElementDataType TYPE_OF =
    IN_FLOATS<Stored> ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
template <>
constexpr ONNXTensorElementDataType TYPE_OF<int8_t> = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;

/// The dimensions of a tensor, without memory of their own to allocate: a step compares dozens of them.
class Sizes {
 public:
  static constexpr size_t MAX_RANK = 4;

  Sizes() = default;
  Sizes(std::initializer_list<int64_t> sizes) { std::copy(sizes.begin(), sizes.end(), resized(sizes.size())); }

  /// Makes it have `count` dimensions (at most MAX_RANK), and returns where they are.
  int64_t* resized(size_t count) { return count_ = count, numbers_; }
  size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }
  const int64_t* data() const { return numbers_; }
  const int64_t* begin() const { return numbers_; }
  const int64_t* end() const { return numbers_ + count_; }
  int64_t& back() { return numbers_[count_ - 1]; }
  int64_t operator[](size_t i) const { return numbers_[i]; }
  bool operator==(const Sizes& other) const { return std::equal(begin(), end(), other.begin(), other.end()); }

 private:
  int64_t numbers_[MAX_RANK] = {};
  size_t count_ = 0;
};

struct Tensor {
  void* data = nullptr;  // null for an optional input that the graph leaves out
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  Sizes sizes;

  /// The floats from `offset` on; null if the graph leaves them out.
  const float* floats(int64_t offset = 0) const { return from(static_cast<const float*>(data), offset); }

  /// The numbers of any type that attention reads, from `offset` on; none where the graph leaves them out.
  Numbers numbers(int64_t offset) const {
    if (!data) return {};
    const Numbers all{data, type == TYPE_OF<float>  ? Numbers::FLOATS
                            : type == TYPE_OF<half> ? Numbers::HALVES
                                                    : Numbers::BYTES};
    return all.from(offset);
  }
};

/// What the nodes of all operators share.
class Node {
 public:
  /// The type of all inputs and outputs but the ring and positions.
  static constexpr ONNXTensorElementDataType VALUES = TYPE_OF<float>;

  Node(const OrtApi& ort, const OrtKernelInfo* info) : ort(ort) {
    size_t inputs = 0;
    check(ort.KernelInfo_GetInputCount(info, &inputs));
    for (size_t i = 0; i < inputs; ++i) {
      const OrtValue* value = nullptr;
      int is_constant = 0;
      check(ort.KernelInfoGetConstantInput_tensor(info, i, &is_constant, &value));
      constants_.push_back(tensor_of(is_constant ? value : nullptr));
    }
  }

  const OrtApi& ort;

 protected:
  /// Working memory of the thread that asks, for one task at a time.
  static Scratch& scratch() {
    static thread_local Scratch own;
    return own;
  }

  int64_t attribute(const OrtKernelInfo* info, const char* name) const {
    int64_t value = 0;
    check(ort.KernelInfoGetAttribute_int64(info, name, &value));
    return value;
  }

  float attribute(const OrtKernelInfo* info, const char* name, float otherwise) const {
    float value = otherwise;
    if (OrtStatus* absent = ort.KernelInfoGetAttribute_float(info, name, &value)) {
      ort.ReleaseStatus(absent);
      return otherwise;
    }
    return value;
  }

  void check(OrtStatus* status) const {
    if (status) throw Failure{status};
  }

  void expect(bool holds) const {
    constexpr const char* message = "the shapes and attributes given to a node do not fit together";
    if (!holds) throw Failure{ort.CreateStatus(ORT_INVALID_ARGUMENT, message)};
  }

  /// Input `index`, which must have `rank` dimensions, or at least one with ANY_RANK; a Tensor without data
  /// where the graph leaves it out.
  Tensor input(const OrtKernelContext* context, size_t index, size_t rank) const {
    if (index >= constants_.size() || constants_[index].data) return constant(index, rank);
    const OrtValue* value = nullptr;
    check(ort.KernelContext_GetInput(context, index, &value));
    return checked(tensor_of(value), rank);
  }

  /// The same for an input that is a constant of the graph; a Tensor without data for any other.
  Tensor constant(size_t index, size_t rank) const {
    return index < constants_.size() ? checked(constants_[index], rank) : Tensor{};
  }

  Tensor checked(Tensor tensor, size_t rank) const {
    if (!tensor.data) return tensor;
    expect(tensor.sizes.size() == rank || (rank == ANY_RANK && !tensor.sizes.empty()));
    for (int64_t size : tensor.sizes) expect(0 < size && size <= LARGEST_SIZE);
    return tensor;
  }

  Tensor tensor_of(const OrtValue* value) const {
    Tensor tensor;
    if (!value) return tensor;
    OrtTensorTypeAndShapeInfo* shape = nullptr;
    size_t rank = 0;
    check(ort.GetTensorTypeAndShape(value, &shape));
    // The shape is released before a failure of any of these calls is thrown.
    OrtStatus* status = ort.GetDimensionsCount(shape, &rank);
    if (!status) status = ort.GetTensorElementType(shape, &tensor.type);
    const bool known = rank <= Sizes::MAX_RANK;
    if (!status && known) status = ort.GetDimensions(shape, tensor.sizes.resized(rank), rank);
    ort.ReleaseTensorTypeAndShapeInfo(shape);
    check(status);
    expect(known);
    // An empty tensor has no data and would be taken for one that the graph leaves out, so it is refused.
    for (int64_t size : tensor.sizes) expect(size != 0);
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

  /// The matrix of the constant inputs with these numbers; without values if the graph leaves it out.
  ///
  /// turned: whether the graph has W [K, N] as [N, K], if it is not in blocks.
  GivenMatrix given(size_t values, size_t scales, size_t zero_points,
                    bool turned) const {
    const Tensor tensor = constant(values, ANY_RANK), factors = constant(scales, ANY_RANK);
    const Tensor points = constant(zero_points, 2);
    if (!tensor.data) return {};
    GivenMatrix matrix{};
    matrix.values = tensor.data, matrix.scales = factors.floats(), matrix.turned = turned;
    matrix.zero_points = static_cast<const uint8_t*>(points.data);
    if (tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8) {
      expect(tensor.sizes.size() == 3 && points.data);
      const int64_t columns = tensor.sizes[0], blocks = tensor.sizes[1];
      matrix.form = GivenMatrix::BLOCKS;
      matrix.bits = tensor.sizes[2] == BLOCK_DEPTH ? 8 : 4;
      matrix.columns = columns, matrix.depth = blocks * BLOCK_DEPTH;
      expect(tensor.sizes[2] * 8 == BLOCK_DEPTH * matrix.bits);
      expect(factors.sizes == Sizes({columns, blocks}));
      expect(points.type == tensor.type && points.sizes[0] == columns);
      expect(points.sizes[1] == (matrix.bits == 8 ? blocks : (blocks + 1) / 2));
    } else {
      expect(tensor.sizes.size() == 2 && !points.data);
      matrix.columns = tensor.sizes[turned ? 0 : 1], matrix.depth = tensor.sizes[turned ? 1 : 0];
      matrix.form = tensor.type == TYPE_OF<int8_t> ? GivenMatrix::BYTES : GivenMatrix::FLOATS;
      expect(tensor.type == TYPE_OF<int8_t> || tensor.type == TYPE_OF<float>);
      expect(tensor.type == TYPE_OF<float> ? !factors.data : factors.sizes == Sizes({matrix.columns}));
    }
    expect(!factors.data || factors.type == TYPE_OF<float>);
    return matrix;
  }

  /// The same matrix with a bias [N], which may be left out, packed for `multiply`.
  Matrix packed(const GivenMatrix& matrix, size_t bias) const {
    const Tensor added = constant(bias, 1);
    if (!matrix.values) return {};
    expect(!added.data || (added.type == TYPE_OF<float> && added.sizes == Sizes({matrix.columns})));
    return Matrix(matrix, added.floats());
  }

  /// Multiplies `rows` rows of x by a matrix and adds its bias: y = x·W + bias.
  ///
  /// adds: adds the product to y. activation: of the sums. Both rows begin a `pitch_of` apart; the
  /// numbers behind the columns of y become 0.
  void multiply(const OrtKernelContext* context, const Matrix& matrix, int64_t rows, const float* x, float* y,
                bool adds = false, Activation activation = Activation::NONE) const {
    const int64_t x_pitch = pitch_of(matrix.depth()), y_pitch = pitch_of(matrix.columns());
    static thread_local Scratch rounded_of_thread;  // the tasks read it
    const Rounded rounded = matrix.rounded(rows, x, x_pitch, rounded_of_thread);
    const int64_t bands = (rows + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    // One row takes as long as reading the weights, of which a float takes as long as a multiply-add.
    const int64_t cost = rows == 1 ? matrix.panel_bytes() / sizeof(float)
                                   : std::min<int64_t>(rows, BLOCK_TOKENS) * matrix.depth() * 2 * QUAD_COLUMNS;
    parallel(context, bands * matrix.panels(), cost, [&](int64_t i) {
      const int64_t p = i / bands, row = i % bands * BLOCK_TOKENS, count = std::min<int64_t>(BLOCK_TOKENS, rows - row);
      const int64_t first = matrix.first_column(p);
      const float* bias = matrix.bias() + first;
      float* to = y + row * y_pitch + first;
      const int64_t wide = matrix.vectors(p) * LANES;
      matrix.multiply(p, count, x + row * x_pitch, x_pitch, rounded.from(row), adds ? to : bias,
                      adds ? y_pitch : 0, to, y_pitch);
      for (int64_t r = 0; r < count; ++r, to += y_pitch) {
        for (int64_t c = 0; adds && c < wide; c += LANES) store(to + c, load(to + c) + load(bias + c));
        for (int64_t c = 0; activation == Activation::RELU && c < wide; c += LANES) store(to + c, larger(vec{}, load(to + c)));
        if (p + 1 == matrix.panels()) std::fill(to + matrix.columns() - first, to + y_pitch - first, 0.0f);
      }
    });
  }

  /// Calls work(0) … work(count - 1), on the threads of the session if it is worth it.
  ///
  /// cost: of one call, in multiply-adds.
  template <class Work>
  void parallel(const OrtKernelContext* context, int64_t count, int64_t cost, const Work& work) const {
    const int64_t size = count * cost;
    const auto alone = [&] {
      for (int64_t i = 0; i < count; ++i) work(i);
    };
    if (!all_of_step_) return count == 1 || size < Load::WORTH_WAKING ? alone() : share(context, count, 0, work);
    int64_t batches = 1;  // a power of two, so that few threads have as much to do
    while (batches < count && 2 * batches * WORTH_A_THREAD <= size) batches *= 2;
    if (batches == 1) return alone();
    Load& load = Load::of_this_thread();
    const Load::Clock::time_point began = Load::Clock::now();
    if (load.shares(began, size)) {
      share(context, count, std::min(batches, count), work);
      load.ended_shared(began, Load::Clock::now(), size);
    } else {
      alone();
      load.ended_alone(began, Load::Clock::now(), size);
    }
  }

  // Whether nodes of this library compute all of a step. Otherwise ONNX Runtime's nodes keep its threads busy.
  bool all_of_step_ = false;

 private:
  template <class Work>
  void share(const OrtKernelContext* context, int64_t count, int64_t batches, const Work& work) const {
    struct Job {
      const Work& work;
      std::atomic<bool> out_of_memory;
    } job{work, {false}};
    // An exception must not leave the task: ONNX Runtime calls it as a C function.
    auto task = [](void* data, size_t i) {
      Job& own = *static_cast<Job*>(data);
      try {
        own.work(static_cast<int64_t>(i));
      } catch (const std::bad_alloc&) {
        own.out_of_memory = true;
      }
    };
    check(ort.KernelContext_ParallelFor(context, task, count, batches, &job));
    if (job.out_of_memory) throw std::bad_alloc();
  }

  // The inputs that are constants of the graph, so that a step asks for none of them; the others have no data.
  std::vector<Tensor> constants_;
};

/// A node of ring attention: its attributes, and the work of a step.
template <class Stored>
class Attention : public Node {
 public:
  using Ring = Stored;
  static constexpr size_t INPUTS = IN_BYTES<Stored> ? 19 : 17, OUTPUTS = IN_BYTES<Stored> ? 5 : 3;
  static bool has_any_type(size_t input) { return input == 4 || input == 13 || input == 14; }

  Attention(const OrtApi& ort, const OrtKernelInfo* info) : Node(ort, info) {
    int64_t full = 0;
    for (auto [name, to] : {std::pair<const char*, int64_t*>{"heads", &heads},
                            {"mem_len", &rule.mem_len},
                            {"nearest", &rule.nearest},
                            {"full", &full},
                            {"query_at", &query_at},
                            {"key_at", &key_at},
                            {"value_at", &value_at},
                            {"head_dim", &head_dim}})
      *to = attribute(info, name);
    rule.window_grows = full != 0;
    for (int64_t x : {heads, rule.mem_len, rule.nearest, query_at, key_at, value_at, head_dim})
      expect(0 <= x && x <= LARGEST_SIZE);
    expect(heads > 0);
    rule.epsilon = attribute(info, "epsilon", 0);
  }

  void compute(OrtKernelContext* context) const {
    Call call;
    call.query = input(context, 0, 3), call.context = input(context, 1, 3);
    take(context, call);
    call.answers = static_cast<float*>(output(context, 0, {call.batch, call.length, heads * head_dim}));
    call.answer_pitch = heads * head_dim;
    attend(context, call);
  }

 protected:
  int64_t heads = 0, head_dim = 0, query_at = 0, key_at = 0, value_at = 0;
  Rule rule{};

  /// The inputs and outputs of one step, whose sizes fit together. Each pair is of keys and of values.
  struct Call {
    Tensor query, context, past[2], table, positions, u, v, bias, initial[2], gate, table_scales;
    Tensor persistent[2], persistent_scales[2], past_scales[2];
    int64_t batch = 0, length = 0, slots = 0, rows = 0, vectors = 0, query_pitch = 0, context_pitch = 0;
    float* answers = nullptr;  // rows `answer_pitch` apart
    int64_t answer_pitch = 0;
    Stored* ring[2] = {};  // null if the segment attends only to itself
    float* scales[2] = {};  // of a ring of bytes
  };

  /// Takes a step's tensors from the third on, and checks every size that is later used as an offset.
  void take(OrtKernelContext* context, Call& call) const {
    size_t next = 2;
    for (Tensor& side : call.past) side = input(context, next++, 4);
    call.table = input(context, next++, 3), call.positions = input(context, next++, 2);
    for (Tensor* by_head : {&call.u, &call.v, &call.bias, &call.initial[0], &call.initial[1], &call.gate,
                            &call.table_scales, &call.persistent[0], &call.persistent[1],
                            &call.persistent_scales[0], &call.persistent_scales[1]})
      *by_head = input(context, next++, 3);
    for (Tensor& side : call.past_scales) side = input(context, next++, 4);
    check_sizes(call);
    for (int side = 0; side < 2; ++side)
      if (call.past[side].data)
        call.ring[side] = static_cast<Stored*>(output(context, 1 + side, call.past[side].sizes));
    if (IN_BYTES<Stored>)
      for (int side = 0; side < 2; ++side)
        call.scales[side] = static_cast<float*>(output(context, 3 + side, call.past_scales[side].sizes));
  }

  /// Writes the ring and the answers of all heads.
  void attend(OrtKernelContext* context, const Call& call) const {
    const int64_t heads_and_rows = heads * call.batch, blocks = (call.length + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    const int64_t width = 3 * head_dim;  // multiply-adds for a key: content, position and value
    // With several blocks of queries, several tasks read one head's ring: it must be complete before they
    // start. With one block, the task that reads a head's ring writes it too, while it is in that core's
    // cache.
    if (call.ring[0] && blocks > 1)
      parallel(context, heads_and_rows, call.length * width,
               [&](int64_t i) { write(call, i % call.batch, i / call.batch); });
    // Streams of a step of one token share a task, and one reading of the position table, if many tasks are left.
    const int64_t together = call.length == 1 ? std::clamp<int64_t>(heads_and_rows / MIN_TASKS, 1, MAX_STREAMS) : 1;
    const int64_t groups = (call.batch + together - 1) / together;
    const int64_t queries = std::min<int64_t>(BLOCK_TOKENS, call.length);
    const int64_t cost = together * queries * (rule.mem_len + call.length) * width;
    parallel(context, groups * heads * blocks, cost, [&](int64_t i) {
      const int64_t group = i % groups, h = i / groups % heads, first = i / (groups * heads) * BLOCK_TOKENS;
      const int64_t row = group * call.batch / groups, end = (group + 1) * call.batch / groups;
      Head<Stored> heads_here[MAX_STREAMS];
      for (int64_t b = row; b < end; ++b) {
        if (call.ring[0] && blocks == 1) write(call, b, h);
        heads_here[b - row] = head_of(call, b, h);
      }
      xl::attend(heads_here, end - row, rule, first, std::min<int64_t>(BLOCK_TOKENS, call.length - first), scratch());
    });
  }

 private:
  /// Fills in the sizes of a call, and refuses tensors whose sizes or types do not fit together.
  void check_sizes(Call& call) const {
    const Tensor &keys = call.past[0], &table = call.table, &persistent = call.persistent[0];
    const int64_t batch = call.batch = call.query.sizes[0], length = call.length = call.query.sizes[1];
    const int64_t slots = call.slots = keys.data ? keys.sizes[2] : length;
    for (const Tensor* by_distance : {&call.gate, &call.bias, &call.table})
      if (by_distance->data) call.rows = by_distance->sizes[2];
    const int64_t rows = call.rows = std::max<int64_t>(call.rows, 1);
    const int64_t vectors = call.vectors = persistent.data ? persistent.sizes[2] : 0;
    call.query_pitch = call.query.sizes[2], call.context_pitch = call.context.sizes[2];
    expect(head_dim > 0);
    expect(call.past[1].sizes == keys.sizes);
    expect(keys.data || IN_FLOATS<Stored>);
    expect(!keys.data || keys.sizes == Sizes({batch, heads, slots, head_dim}));
    for (const Tensor& scales : call.past_scales)
      expect(IN_BYTES<Stored> ? scales.sizes == Sizes({batch, heads, slots, 1}) : !scales.data);
    expect(!table.data || table.sizes == Sizes({heads, head_dim, rows}));
    expect(call.context.sizes[0] == batch && call.context.sizes[1] == length);
    expect(call.positions.sizes == Sizes({batch, length}));
    expect((keys.data ? rule.mem_len : 0) + length <= slots);
    expect(query_at + heads * head_dim <= call.query_pitch);
    expect(std::max(key_at, value_at) + heads * head_dim <= call.context_pitch);
    for (const Tensor* optional : {&call.u, &call.v, &call.initial[0], &call.initial[1]})
      expect(!optional->data || optional->sizes == Sizes({heads, 1, head_dim}));
    for (const Tensor* optional : {&call.bias, &call.gate, &call.table_scales})
      expect(!optional->data || optional->sizes == Sizes({heads, 1, rows}));
    expect(!call.initial[0].data == !call.initial[1].data);
    expect(!call.initial[0].data || keys.data);  // without a ring there are no slots before the segment
    expect(!call.gate.data || rule.epsilon > 0);
    expect(is_byte(table) == !!call.table_scales.data);
    const Sizes by_vector[] = {{heads, head_dim, vectors}, {heads, vectors, head_dim}};
    for (int side = 0; side < 2; ++side) {
      const Tensor &own = call.persistent[side], &scales = call.persistent_scales[side];
      expect(persistent.data ? own.sizes == by_vector[side] : !own.data);
      expect(is_byte(own) ? scales.sizes == Sizes(side ? Sizes{heads, vectors, 1} : Sizes{heads, 1, vectors})
                          : !scales.data);
    }
    for (const Tensor* stored : {&table, &persistent, static_cast<const Tensor*>(&call.persistent[1])})
      expect(!stored->data || stored->type == TYPE_OF<float> || stored->type == TYPE_OF<half> ||
             stored->type == TYPE_OF<int8_t>);
  }

  static bool is_byte(const Tensor& tensor) { return tensor.data && tensor.type == TYPE_OF<int8_t>; }

  /// Head h of row b of the batch, as attention reads it.
  Head<Stored> head_of(const Call& call, int64_t b, int64_t h) const {
    const int64_t width = head_dim, slots = (b * heads + h) * call.slots;
    const int64_t by_distance = h * call.rows, vectors = h * call.vectors;
    const float* segment = call.context.floats(b * call.length * call.context_pitch + h * width);
    Head<Stored> head{};
    head.query = call.query.floats(b * call.length * call.query_pitch + query_at + h * width);
    head.u = call.u.floats(h * width), head.v = call.v.floats(h * width);
    head.bias = call.bias.floats(by_distance), head.gate = call.gate.floats(by_distance);
    head.table = call.table.numbers(by_distance * width);
    head.table_scales = call.table_scales.floats(by_distance);
    if (call.ring[0]) {
      head.keys = call.ring[0] + slots * width, head.values = call.ring[1] + slots * width;
      head.key_scales = from(call.scales[0], slots), head.value_scales = from(call.scales[1], slots);
    } else if constexpr (IN_FLOATS<Stored>) {
      head.keys = segment + key_at, head.values = segment + value_at;
    }
    head.initial_key = call.initial[0].floats(h * width);
    head.initial_value = call.initial[1].floats(h * width);
    head.persistent = call.vectors;
    head.persistent_keys = call.persistent[0].numbers(vectors * width);
    head.persistent_values = call.persistent[1].numbers(vectors * width);
    head.persistent_key_scales = call.persistent_scales[0].floats(vectors);
    head.persistent_value_scales = call.persistent_scales[1].floats(vectors);
    head.out = call.answers + b * call.length * call.answer_pitch + h * width;
    head.query_pitch = call.query_pitch, head.out_pitch = call.answer_pitch;
    head.ring_pitch = call.ring[0] ? width : call.context_pitch;
    head.width = width, head.slots = call.slots, head.rows = call.rows, head.length = call.length;
    head.position = call.ring[0] ? static_cast<const int64_t*>(call.positions.data)[b * call.length] : 0;
    return head;
  }

  /// Writes a head's new keys and values into its ring.
  void write(const Call& call, int64_t b, int64_t h) const {
    const int64_t width = head_dim, first = (b * heads + h) * call.slots;
    const Head<Stored> head = head_of(call, b, h);
    for (int side = 0; side < 2; ++side) {
      Stored* present = call.ring[side] + first * width;
      const Stored* past = static_cast<const Stored*>(call.past[side].data) + first * width;
      const float* fresh = call.context.floats(b * call.length * call.context_pitch);
      fresh += (side ? value_at : key_at) + h * width;
      // Where past and present are not bound to one buffer, all of the past is copied.
      if (present != past) std::memcpy(present, past, call.slots * width * sizeof(Stored));
      if constexpr (IN_BYTES<Stored>) {
        float* scales = call.scales[side] + first;
        const float* past_scales = call.past_scales[side].floats(first);
        if (scales != past_scales) std::memcpy(scales, past_scales, call.slots * sizeof(float));
        for (int64_t t = 0; t < call.length; ++t)
          scales[head.slot(t)] =
              quantise(fresh + t * call.context_pitch, width, present + head.slot(t) * width);
      } else {
        for (int64_t t = 0; t < call.length; ++t)
          copy(fresh + t * call.context_pitch, width, present + head.slot(t) * width);
      }
    }
  }
};

}  // namespace xl
