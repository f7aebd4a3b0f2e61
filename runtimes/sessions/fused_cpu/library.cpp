// The operators xl_export::RelativeAttention and, over a ring of halves, xl_export::RelativeAttentionOverHalves for ONNX Runtime.
//
// inputs   0 query   float [B, T, …]  each token's row holds the heads' queries side by side, from column `query_at`
//          1 context float [B, T, …]  likewise the new keys and values, from `key_at` and `value_at`
//          2 keys    [B, h, S, K]     the ring, of floats or halves; 3 values: the same; without both the segment is all there is
//          4 table   [h, K, R]        of floats or halves: r(d) by distance, longer distances use the last row; optional
//          5 positions int64 [B, T]   of the tokens; they follow one another
//          6 u, 7 v  float [h, 1, K]; 8 bias float [h, 1, R]: optional
// outputs  0 answers float [B, T, h·K]; 1 keys, 2 values: the ring with the new tokens, bound to the same buffers as the inputs
// The ring's type is in the operator's name, for its outputs must have a declared one; the table's is asked of the tensor.
// attributes: heads, head_dim, mem_len, nearest, full, query_at, key_at, value_at

#include <exception>
#include <string>
#include <type_traits>
#include <vector>

#include "attention.hpp"
#include "ort.hpp"

namespace {

constexpr int64_t MOST = 1 << 24;  // of any size; so no product of two overflows

struct Failure {
  ort::Status* status;
};

template <class Stored>
constexpr bool FLOATS = std::is_same_v<Stored, float>;
template <class Stored>
constexpr int TYPE = FLOATS<Stored> ? ort::FLOAT : ort::FLOAT16;

using Sizes = std::vector<int64_t>;

struct Tensor {
  void* data = nullptr;
  int type = ort::ANY;
  Sizes sizes;
  const float* floats() const { return static_cast<const float*>(data); }
};

template <class Stored>
struct Kernel {
  explicit Kernel(const void* const* table, const ort::Info* info) : api(table) {
    int64_t full = 0;
    for (auto [name, to] : {std::pair<const char*, int64_t*>{"heads", &heads}, {"mem_len", &rule.mem_len},
                            {"nearest", &rule.nearest}, {"full", &full}, {"query_at", &query_at}, {"key_at", &key_at},
                            {"value_at", &value_at}, {"head_dim", &head_dim}})
      check(api.attribute(info, name, to));
    rule.full = full != 0;
    for (int64_t x : {heads, rule.mem_len, rule.nearest, query_at, key_at, value_at, head_dim}) expect(0 <= x && x <= MOST);
    expect(heads > 0);
  }

  void compute(ort::Context* context) const {
    const Call call = checked(context);
    const int64_t heads_and_rows = heads * call.batch, blocks = (call.length + xl::BLOCK - 1) / xl::BLOCK;
    if (call.ring[0] && blocks > 1)  // several tasks read what is written
      parallel(context, heads_and_rows, [&](int64_t i) { write(call, i % call.batch, i / call.batch); });
    parallel(context, heads_and_rows * blocks, [&](int64_t i) {
      static thread_local xl::Scratch scratch;
      const int64_t b = i % call.batch, h = i / call.batch % heads, first = i / heads_and_rows * xl::BLOCK;
      if (call.ring[0] && blocks == 1) write(call, b, h);
      xl::attend(head_of(call, b, h), rule, first, std::min<int64_t>(xl::BLOCK, call.length - first), scratch);
    });
  }

  ort::Api api;

 private:
  int64_t heads = 0, head_dim = 0, query_at = 0, key_at = 0, value_at = 0;
  xl::Rule rule{};

  /// The inputs and outputs of one step, whose sizes fit together.
  struct Call {
    Tensor query, fresh, past[2], table, positions, u, v, bias;  // past: keys and values
    int64_t batch = 0, length = 0, slots = 0, rows = 0, query_pitch = 0, fresh_pitch = 0;
    float* answers = nullptr;
    Stored* ring[2] = {};  // null where the segment is all there is
  };

  Call checked(ort::Context* context) const {
    Call call{input(context, 0, 3), input(context, 1, 3), {input(context, 2, 4), input(context, 3, 4)}, input(context, 4, 3),
              input(context, 5, 2), input(context, 6, 3), input(context, 7, 3), input(context, 8, 3)};
    const Tensor &keys = call.past[0], &table = call.table;
    const int64_t batch = call.batch = call.query.sizes[0], length = call.length = call.query.sizes[1];
    const int64_t slots = call.slots = keys.data ? keys.sizes[2] : length, rows = call.rows = table.data ? table.sizes[2] : 1;
    call.query_pitch = call.query.sizes[2], call.fresh_pitch = call.fresh.sizes[2];
    expect(head_dim > 0);
    expect(call.past[1].sizes == keys.sizes);
    expect(keys.data || FLOATS<Stored>);
    expect(!keys.data || keys.sizes == Sizes({batch, heads, slots, head_dim}));
    expect(!table.data || table.type == ort::FLOAT || table.type == ort::FLOAT16);
    expect(table.data ? table.sizes == Sizes({heads, head_dim, rows}) : !call.bias.data);
    expect(call.fresh.sizes[0] == batch && call.fresh.sizes[1] == length);
    expect(call.positions.sizes == Sizes({batch, length}));
    expect((keys.data ? rule.mem_len : 0) + length <= slots);
    expect(query_at + heads * head_dim <= call.query_pitch);
    expect(std::max(key_at, value_at) + heads * head_dim <= call.fresh_pitch);
    for (const Tensor* pair : {&call.u, &call.v}) expect(!pair->data || pair->sizes == Sizes({heads, 1, head_dim}));
    expect(!call.bias.data || call.bias.sizes == Sizes({heads, 1, rows}));
    call.answers = static_cast<float*>(output(context, 0, {batch, length, heads * head_dim}));
    for (int side = 0; side < 2; ++side)
      call.ring[side] = keys.data ? static_cast<Stored*>(output(context, 1 + side, keys.sizes)) : nullptr;
    return call;
  }

  xl::Head<Stored> head_of(const Call& call, int64_t b, int64_t h) const {
    const int64_t width = head_dim, ring = (b * heads + h) * call.slots * width;
    const float* segment = call.fresh.floats() + b * call.length * call.fresh_pitch + h * width;
    xl::Head<Stored> head{};
    head.query = call.query.floats() + b * call.length * call.query_pitch + query_at + h * width;
    head.u = call.u.data ? call.u.floats() + h * width : nullptr;
    head.v = call.v.data ? call.v.floats() + h * width : nullptr;
    if (call.ring[0]) head.keys = call.ring[0] + ring, head.values = call.ring[1] + ring;
    else if constexpr (FLOATS<Stored>) head.keys = segment + key_at, head.values = segment + value_at;
    const int64_t before = h * call.rows * width;
    if (call.table.type == ort::FLOAT) head.table = call.table.floats() + before;
    if (call.table.type == ort::FLOAT16) head.half_table = static_cast<const xl::half*>(call.table.data) + before;
    head.bias = call.bias.data ? call.bias.floats() + h * call.rows : nullptr;
    head.out = call.answers + b * call.length * heads * width + h * width;
    head.query_pitch = call.query_pitch, head.out_pitch = heads * width;
    head.ring_pitch = call.ring[0] ? width : call.fresh_pitch;
    head.width = width, head.slots = call.slots, head.rows = call.rows, head.length = call.length;
    head.position = call.ring[0] ? static_cast<const int64_t*>(call.positions.data)[b * call.length] : 0;
    return head;
  }

  /// Writes a head's new keys and values into its ring.
  void write(const Call& call, int64_t b, int64_t h) const {
    const int64_t width = head_dim, whole = call.slots * width;
    const xl::Head<Stored> head = head_of(call, b, h);
    for (int side = 0; side < 2; ++side) {
      Stored* mine = call.ring[side] + (b * heads + h) * whole;
      const Stored* before = static_cast<const Stored*>(call.past[side].data) + (b * heads + h) * whole;
      const float* fresh = call.fresh.floats() + b * call.length * call.fresh_pitch + (side ? value_at : key_at) + h * width;
      if (mine != before) std::memcpy(mine, before, whole * sizeof(Stored));
      for (int64_t t = 0; t < call.length; ++t) xl::copy(fresh + t * call.fresh_pitch, width, mine + head.slot(t) * width);
    }
  }

  void check(ort::Status* status) const {
    if (status) throw Failure{status};
  }
  void expect(bool holds) const {
    constexpr const char* said = "the shapes and attributes given to RelativeAttention do not fit together";
    if (!holds) throw Failure{api.status(ort::INVALID_ARGUMENT, said)};
  }

  Tensor input(const ort::Context* context, size_t index, size_t rank) const {
    const ort::Value* value = nullptr;
    Tensor tensor;
    check(api.input(context, index, &value));
    if (!value) return tensor;
    ort::Shape* shape = nullptr;
    size_t found = 0;
    check(api.shape(value, &shape));
    ort::Status* status = api.rank(shape, &found);
    if (!status) status = api.type(shape, &tensor.type);
    tensor.sizes.resize(found);
    if (!status) status = api.sizes(shape, tensor.sizes.data(), found);
    api.release_shape(shape);
    check(status);
    expect(found == rank);
    for (int64_t size : tensor.sizes) expect(0 < size && size <= MOST);  // what is empty has no data, and would seem absent
    check(api.data(value, &tensor.data));
    return tensor;
  }

  void* output(ort::Context* context, size_t index, const Sizes& sizes) const {
    ort::Value* value = nullptr;
    void* data = nullptr;
    check(api.output(context, index, sizes.data(), sizes.size(), &value));
    expect(value);  // a graph may leave an optional output out
    check(api.data(value, &data));
    return data;
  }

  template <class Work>
  void parallel(const ort::Context* context, int64_t count, const Work& work) const {
    struct Job {
      const Work& work;
      bool failed;
    } job{work, false};
    check(api.parallel_for(
        context,
        [](void* data, size_t i) {
          Job& mine = *static_cast<Job*>(data);
          try {
            mine.work(static_cast<int64_t>(i));
          } catch (const std::bad_alloc&) {
            mine.failed = true;
          }
        },
        count, 0, &job));
    if (job.failed) throw std::bad_alloc();
  }
};

template <class Work>
ort::Status* guarded(const ort::Api& api, const Work& work) {
  try {
    work();
    return nullptr;
  } catch (const Failure& failure) {
    return failure.status;
  } catch (const std::exception& error) {
    return api.status(ort::NOT_IMPLEMENTED, error.what());
  }
}

template <class Stored>
ort::CustomOp described() {
  ort::CustomOp op{};
  op.version = ort::VERSION;
  op.name = [](const ort::CustomOp*) { return FLOATS<Stored> ? "RelativeAttention" : "RelativeAttentionOverHalves"; };
  op.provider = [](const ort::CustomOp*) -> const char* { return nullptr; };
  op.input_type = [](const ort::CustomOp*, size_t i) {
    return i == 2 || i == 3 ? TYPE<Stored> : i == 4 ? ort::ANY : i == 5 ? ort::INT64 : ort::FLOAT;
  };
  op.input_count = [](const ort::CustomOp*) -> size_t { return 9; };
  op.output_type = [](const ort::CustomOp*, size_t i) { return i > 0 ? TYPE<Stored> : ort::FLOAT; };
  op.output_count = [](const ort::CustomOp*) -> size_t { return 3; };
  op.destroy = [](void* kernel) { delete static_cast<Kernel<Stored>*>(kernel); };
  op.input_characteristic = [](const ort::CustomOp*, size_t i) { return i == 2 || i == 3 || i == 4 || i >= 6 ? 1 : 0; };
  op.output_characteristic = [](const ort::CustomOp*, size_t i) { return i > 0 ? 1 : 0; };
  op.input_memory_type = [](const ort::CustomOp*, size_t) { return 0; };
  op.variadic_input_min = op.variadic_output_min = [](const ort::CustomOp*) { return 1; };
  op.variadic_input_same = op.variadic_output_same = [](const ort::CustomOp*) { return 1; };
  op.create_kernel_v2 = [](const ort::CustomOp*, const void* const* table, const ort::Info* info, void** kernel) {
    return guarded(ort::Api(table), [&] { *kernel = new Kernel<Stored>(table, info); });
  };
  op.compute_v2 = [](void* kernel, ort::Context* context) {
    const Kernel<Stored>& mine = *static_cast<Kernel<Stored>*>(kernel);
    return guarded(mine.api, [&] { mine.compute(context); });
  };
  op.start_version = [](const ort::CustomOp*) { return 1; };
  op.end_version = [](const ort::CustomOp*) { return INT32_MAX; };
  return op;
}

const ort::CustomOp OPERATORS[] = {described<float>(), described<xl::half>()};

}  // namespace

extern "C" ort::Status* RegisterCustomOps(ort::Options* options, const ort::ApiBase* base) {
  const ort::Api api(base->get_api(ort::VERSION));
  static ort::Domain* domain = nullptr;  // lives as long as the library, as ONNX Runtime asks
  if (!domain) {
    ort::Domain* made = nullptr;
    if (ort::Status* status = api.create_domain("xl_export", &made)) return status;
    for (const ort::CustomOp& op : OPERATORS)
      if (ort::Status* status = api.add_to_domain(made, &op)) return status;
    domain = made;
  }
  return api.add_domain(options, domain);
}
