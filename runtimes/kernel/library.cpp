// The operator xl_export::RelativeAttention for ONNX Runtime, as a library of custom operators.
//
// inputs   0 query   float [B, T, …]  each token's row holds the heads' queries side by side, from column `query_at`
//          1 context float [B, T, …]  likewise the new keys and values, from `key_at` and `value_at`
//          2 keys    float [B, h, S, K]  the ring; 3 values: the same; without both the segment is all there is
//          4 table   float [h, K, R]  r(d) by distance, longer distances use the last row; optional
//          5 positions int64 [B, T]   of the tokens; they follow one another
//          6 u, 7 v  float [h, 1, K]; 8 bias float [h, 1, R]: optional
// outputs  0 answers float [B, T, h·K]; 1 keys, 2 values: the ring with the new tokens, bound to the same buffers as the inputs
// attributes: heads, head_dim, mem_len, nearest, full, query_at, key_at, value_at

#include <exception>
#include <string>
#include <vector>

#include "attention.hpp"
#include "ort.hpp"

namespace {

constexpr int64_t MOST = 1 << 24;  // of any size; so no product of two overflows

struct Failure {
  ort::Status* status;
};

struct Tensor {
  void* data = nullptr;
  std::vector<int64_t> sizes;
  const float* floats() const { return static_cast<const float*>(data); }
};

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
    Tensor query = input(context, 0, 3), fresh = input(context, 1, 3), keys = input(context, 2, 4), values = input(context, 3, 4);
    Tensor table = input(context, 4, 3), positions = input(context, 5, 2);
    Tensor u = input(context, 6, 3), v = input(context, 7, 3), bias = input(context, 8, 3);
    const int64_t batch = query.sizes[0], length = query.sizes[1], pitch = query.sizes[2], fresh_pitch = fresh.sizes[2];
    const int64_t slots = keys.data ? keys.sizes[2] : length, width = head_dim;
    const int64_t rows = table.data ? table.sizes[2] : 1, whole = heads * width;
    for (int64_t x : {batch, length, width, rows, slots, pitch, fresh_pitch}) expect(0 < x && x <= MOST);
    expect(values.sizes == keys.sizes);
    expect(!keys.data || keys.sizes == std::vector<int64_t>({batch, heads, slots, width}));
    expect(table.data ? table.sizes == std::vector<int64_t>({heads, width, rows}) : !bias.data);
    expect(fresh.sizes[0] == batch && fresh.sizes[1] == length);
    expect(positions.sizes == std::vector<int64_t>({batch, length}));
    expect((keys.data ? rule.mem_len : 0) + length <= slots);
    expect(query_at + whole <= pitch && std::max(key_at, value_at) + whole <= fresh_pitch);
    for (const Tensor* pair : {&u, &v}) expect(!pair->data || pair->sizes == std::vector<int64_t>({heads, 1, width}));
    expect(!bias.data || bias.sizes == std::vector<int64_t>({heads, 1, rows}));
    float* answers = output(context, 0, {batch, length, whole});
    float* ring[2] = {};
    if (keys.data) ring[0] = output(context, 1, keys.sizes), ring[1] = output(context, 2, values.sizes);
    const Tensor* past[2] = {&keys, &values};
    const int64_t start[2] = {key_at, value_at};

    const int64_t blocks = (length + xl::BLOCK - 1) / xl::BLOCK;
    auto head_of = [&](int64_t b, int64_t h) {
      xl::Head head{};
      head.query = query.floats() + b * length * pitch + query_at + h * width;
      head.u = u.data ? u.floats() + h * width : nullptr;
      head.v = v.data ? v.floats() + h * width : nullptr;
      const float* segment = fresh.floats() + b * length * fresh_pitch + h * width;
      head.keys = ring[0] ? ring[0] + (b * heads + h) * slots * width : segment + key_at;
      head.values = ring[1] ? ring[1] + (b * heads + h) * slots * width : segment + value_at;
      head.ring_pitch = ring[0] ? width : fresh_pitch;
      head.table = table.data ? table.floats() + h * rows * width : nullptr;
      head.bias = bias.data ? bias.floats() + h * rows : nullptr;
      head.out = answers + b * length * whole + h * width;
      head.query_pitch = pitch, head.out_pitch = whole, head.width = width, head.slots = slots, head.rows = rows;
      head.position = ring[0] ? static_cast<const int64_t*>(positions.data)[b * length] : 0, head.length = length;
      return head;
    };
    auto write = [&](int64_t b, int64_t h, const xl::Head& head) {  // a head's new keys and values into its ring
      for (int side = 0; side < 2; ++side) {
        float* mine = ring[side] + (b * heads + h) * slots * width;
        const float* theirs = past[side]->floats() + (b * heads + h) * slots * width;
        if (mine != theirs) std::memcpy(mine, theirs, slots * width * sizeof(float));
        for (int64_t t = 0; t < length; ++t)
          std::memcpy(mine + head.slot(t) * width, fresh.floats() + (b * length + t) * fresh_pitch + start[side] + h * width,
                      width * sizeof(float));
      }
    };
    if (ring[0] && blocks > 1)  // several tasks read what is written
      parallel(context, heads * batch, [&](int64_t i) { write(i % batch, i / batch, head_of(i % batch, i / batch)); });
    parallel(context, heads * batch * blocks, [&](int64_t i) {
      static thread_local xl::Scratch scratch;
      const int64_t b = i % batch, h = i / batch % heads, first = i / batch / heads * xl::BLOCK;
      const xl::Head head = head_of(b, h);
      if (ring[0] && blocks == 1) write(b, h, head);
      xl::attend(head, rule, first, std::min<int64_t>(xl::BLOCK, length - first), scratch);
    });
  }

  ort::Api api;

 private:
  int64_t heads = 0, head_dim = 0, query_at = 0, key_at = 0, value_at = 0;
  xl::Rule rule{};

  void check(ort::Status* status) const {
    if (status) throw Failure{status};
  }
  void expect(bool holds) const {
    if (!holds) throw Failure{api.status(ort::INVALID_ARGUMENT, "the shapes given to RelativeAttention do not fit together")};
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
    tensor.sizes.resize(found);
    if (!status) status = api.sizes(shape, tensor.sizes.data(), found);
    api.release_shape(shape);
    check(status);
    expect(found == rank);
    check(api.data(value, &tensor.data));
    return tensor;
  }

  float* output(ort::Context* context, size_t index, const std::vector<int64_t>& sizes) const {
    ort::Value* value = nullptr;
    void* data = nullptr;
    check(api.output(context, index, sizes.data(), sizes.size(), &value));
    expect(value);  // a graph may leave an optional output out
    check(api.data(value, &data));
    return static_cast<float*>(data);
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

const ort::CustomOp OPERATOR = [] {
  ort::CustomOp op{};
  op.version = ort::VERSION;
  op.name = [](const ort::CustomOp*) { return "RelativeAttention"; };
  op.provider = [](const ort::CustomOp*) -> const char* { return nullptr; };
  op.input_type = [](const ort::CustomOp*, size_t i) { return i == 5 ? ort::INT64 : ort::FLOAT; };
  op.input_count = [](const ort::CustomOp*) -> size_t { return 9; };
  op.output_type = [](const ort::CustomOp*, size_t) { return ort::FLOAT; };
  op.output_count = [](const ort::CustomOp*) -> size_t { return 3; };
  op.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.input_characteristic = [](const ort::CustomOp*, size_t i) { return i == 2 || i == 3 || i == 4 || i >= 6 ? 1 : 0; };
  op.output_characteristic = [](const ort::CustomOp*, size_t i) { return i > 0 ? 1 : 0; };
  op.input_memory_type = [](const ort::CustomOp*, size_t) { return 0; };
  op.variadic_input_min = op.variadic_output_min = [](const ort::CustomOp*) { return 1; };
  op.variadic_input_same = op.variadic_output_same = [](const ort::CustomOp*) { return 1; };
  op.create_kernel_v2 = [](const ort::CustomOp*, const void* const* table, const ort::Info* info, void** kernel) {
    return guarded(ort::Api(table), [&] { *kernel = new Kernel(table, info); });
  };
  op.compute_v2 = [](void* kernel, ort::Context* context) {
    const Kernel& mine = *static_cast<Kernel*>(kernel);
    return guarded(mine.api, [&] { mine.compute(context); });
  };
  op.start_version = [](const ort::CustomOp*) { return 1; };
  op.end_version = [](const ort::CustomOp*) { return INT32_MAX; };
  return op;
}();

}  // namespace

extern "C" ort::Status* RegisterCustomOps(ort::Options* options, const ort::ApiBase* base) {
  const ort::Api api(base->get_api(ort::VERSION));
  static ort::Domain* domain = nullptr;  // lives as long as the library, as ONNX Runtime asks
  if (!domain) {
    if (ort::Status* status = api.create_domain("xl_export", &domain)) return status;
    if (ort::Status* status = api.add_to_domain(domain, &OPERATOR)) return status;
  }
  return api.add_domain(options, domain);
}
