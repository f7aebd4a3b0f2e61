// Runs the fused operator on random inputs through a stand-in for ONNX Runtime.
//
// Every buffer ends where its sizes say, so that a build with -fsanitize=address,undefined finds each access
// beyond one. `driver SEED COUNT` runs COUNT steps and prints how many were computed and how many were
// refused.
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <random>

#include "library.cpp"

// ONNX Runtime declares these types and defines them elsewhere; here they are what the operator needs of
// them.
struct OrtTensorTypeAndShapeInfo {
  std::vector<int64_t> sizes;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
};
struct OrtValue {
  OrtTensorTypeAndShapeInfo shape;
  std::unique_ptr<char[]> data;
};
struct OrtStatus {
  std::string text;
};
struct OrtKernelInfo {
  std::map<std::string, int64_t> attributes;
  float epsilon;  // below 0 where the graph has none
  std::vector<OrtValue*> inputs;  // absent ones are null, and none are at the end
  size_t constants;               // inputs from this one on, and input 1, are constants
};
struct OrtKernelContext {
  std::vector<OrtValue*> inputs;
  std::vector<OrtValue> outputs;
  std::vector<bool> wanted;  // which outputs the graph does not leave out
  size_t stored;             // bytes of a number in the ring
};

namespace {

using Sizes = std::vector<int64_t>;

std::mt19937_64 source;

int64_t pick(int64_t from, int64_t to) { return std::uniform_int_distribution<int64_t>(from, to)(source); }
bool rarely() { return pick(0, 39) == 0; }

OrtValue made(Sizes sizes, size_t width) {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  return {{sizes},
          std::unique_ptr<char[]>(count ? new char[count * width] : nullptr)};  // and not a byte more
}

OrtValue floats(Sizes sizes) {
  OrtValue value = made(sizes, sizeof(float));
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  for (int64_t i = 0; i < count; ++i)
    reinterpret_cast<float*>(value.data.get())[i] = pick(-1000, 1000) * 1e-3f;
  return value;
}

/// Random bytes; with scales of 1/127 they are numbers between -1 and 1.
OrtValue bytes(Sizes sizes) {
  OrtValue value = made(sizes, 1);
  value.shape.type = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  for (int64_t i = 0; i < count; ++i) value.data[i] = static_cast<char>(pick(-127, 127));
  return value;
}

OrtValue all_of(Sizes sizes, float number) {
  OrtValue value = floats(sizes);
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  std::fill_n(reinterpret_cast<float*>(value.data.get()), count, number);
  return value;
}

OrtValue narrowed(const OrtValue& from) {
  OrtValue value = made(from.shape.sizes, sizeof(xl::half));
  value.shape.type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
  int64_t count = 1;
  for (int64_t size : from.shape.sizes) count *= size;
  xl::copy(reinterpret_cast<const float*>(from.data.get()), count,
           reinterpret_cast<xl::half*>(value.data.get()));
  return value;
}

/// The functions of ONNX Runtime that the operator calls; the others are null.
const OrtApi* stand_in() {
  static OrtApi api{};
  api.CreateStatus = [](OrtErrorCode, const char* text) noexcept { return new OrtStatus{text}; };
  api.GetTensorMutableData = [](OrtValue* value, void** out) noexcept -> OrtStatus* {
    *out = value->data.get();
    return nullptr;
  };
  api.GetTensorElementType = [](const OrtTensorTypeAndShapeInfo* shape,
                                ONNXTensorElementDataType* out) noexcept -> OrtStatus* {
    *out = shape->type;
    return nullptr;
  };
  api.GetDimensionsCount = [](const OrtTensorTypeAndShapeInfo* shape, size_t* out) noexcept -> OrtStatus* {
    *out = shape->sizes.size();
    return nullptr;
  };
  api.GetDimensions = [](const OrtTensorTypeAndShapeInfo* shape, int64_t* out,
                         size_t n) noexcept -> OrtStatus* {
    std::copy_n(shape->sizes.data(), n, out);
    return nullptr;
  };
  api.GetTensorTypeAndShape = [](const OrtValue* value,
                                 OrtTensorTypeAndShapeInfo** out) noexcept -> OrtStatus* {
    *out = new OrtTensorTypeAndShapeInfo(value->shape);
    return nullptr;
  };
  api.ReleaseTensorTypeAndShapeInfo = [](OrtTensorTypeAndShapeInfo* shape) noexcept { delete shape; };
  api.KernelInfoGetAttribute_int64 = [](const OrtKernelInfo* info, const char* name,
                                        int64_t* out) noexcept -> OrtStatus* {
    auto found = info->attributes.find(name);
    if (found == info->attributes.end()) return new OrtStatus{"missing"};
    *out = found->second;
    return nullptr;
  };
  api.KernelInfoGetAttribute_float = [](const OrtKernelInfo* info, const char* name,
                                        float* out) noexcept -> OrtStatus* {
    const bool of_gate = name == std::string("epsilon");
    if (of_gate && info->epsilon < 0) return new OrtStatus{"missing"};
    *out = of_gate ? info->epsilon : 1e-5f;
    return nullptr;
  };
  api.KernelInfo_GetInputCount = [](const OrtKernelInfo* info, size_t* out) noexcept -> OrtStatus* {
    *out = info->inputs.size();
    return nullptr;
  };
  api.KernelInfoGetConstantInput_tensor = [](const OrtKernelInfo* info, size_t i, int* is_constant,
                                             const OrtValue** out) noexcept -> OrtStatus* {
    *is_constant = (i == 1 || i >= info->constants) && info->inputs[i];
    *out = *is_constant ? info->inputs[i] : nullptr;
    return nullptr;
  };
  api.ReleaseStatus = [](OrtStatus* status) noexcept { delete status; };
  api.KernelContext_GetInput = [](const OrtKernelContext* context, size_t i,
                                  const OrtValue** out) noexcept -> OrtStatus* {
    *out = context->inputs[i];
    return nullptr;
  };
  api.KernelContext_GetOutput = [](OrtKernelContext* context, size_t i, const int64_t* sizes, size_t rank,
                                   OrtValue** out) noexcept -> OrtStatus* {
    *out = nullptr;
    if (!context->wanted[i]) return nullptr;
    const bool of_ring = i == 1 || i == 2;
    context->outputs[i] = made(Sizes(sizes, sizes + rank), of_ring ? context->stored : sizeof(float));
    *out = &context->outputs[i];
    return nullptr;
  };
  api.KernelContext_ParallelFor = [](const OrtKernelContext*, void (*task)(void*, size_t), size_t n, size_t,
                                     void* data) noexcept -> OrtStatus* {
    for (size_t i = 0; i < n; ++i) task(data, i);
    return nullptr;
  };
  return &api;
}

/// Creates a node of an operator and runs it; whether it was computed rather than refused.
bool run(const OrtCustomOp& op, OrtKernelInfo& info, OrtKernelContext& context) {
  while (!info.inputs.empty() && !info.inputs.back()) info.inputs.pop_back();
  context.inputs = info.inputs;
  void* kernel = nullptr;
  OrtStatus* status = op.CreateKernelV2(&op, stand_in(), &info, &kernel);
  if (!status) status = op.KernelComputeV2(kernel, &context);
  if (kernel) op.KernelDestroy(kernel);
  const bool computed = status == nullptr;
  delete status;
  return computed;
}

/// A random matrix W [K, N] in one of its forms, as the three inputs of a node, and the same as floats.
struct RandomMatrix {
  OrtValue values, scales, zero_points;
  std::vector<float> floats;
  bool has_scales = true, has_zero_points = false;

  /// largest: makes every byte 127, so that a sum of whole numbers is as large as it can be.
  RandomMatrix(int64_t depth, int64_t columns, bool turned, bool largest = false) : floats(depth * columns) {
    const int64_t form = pick(0, 3), blocks = (depth + 31) / 32;
    const auto element = [&](const OrtValue& value, int64_t k, int64_t n) {
      const auto* bytes = reinterpret_cast<const uint8_t*>(value.data.get());
      const int64_t i = turned ? n * depth + k : k * columns + n, at = n * blocks * 32 + k;
      if (form == 0) return reinterpret_cast<const float*>(bytes)[i];
      if (form == 1) return static_cast<float>(reinterpret_cast<const int8_t*>(bytes)[i]);
      return static_cast<float>(form == 2 ? bytes[at] : bytes[at / 2] >> (at % 2 * 4) & 15);
    };
    const Sizes sizes = turned ? Sizes{columns, depth} : Sizes{depth, columns};
    values = form == 0 ? ::floats(sizes) : form == 1 ? bytes(sizes) : bytes({columns, blocks, form == 2 ? 32 : 16});
    scales = form < 2 ? ::floats({columns}) : ::floats({columns, blocks});
    if (form > 0 && largest) std::fill_n(values.data.get(), columns * depth / (form == 3 ? 2 : 1), 127);
    const int64_t points = form == 2 ? blocks : (blocks + 1) / 2;
    zero_points = bytes({columns, points});
    for (OrtValue* value : {&values, &zero_points})
      if (form > 1) value->shape.type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
    has_scales = form > 0, has_zero_points = form > 1;
    for (int64_t k = 0; k < depth; ++k)
      for (int64_t n = 0; n < columns; ++n) {
        const int64_t block = form < 2 ? 0 : k / 32;
        const auto* given = reinterpret_cast<const uint8_t*>(zero_points.data.get()) + n * points;
        const int point = form < 2 ? 0 : form == 2 ? given[block] : given[block / 2] >> (block % 2 * 4) & 15;
        const float scale = reinterpret_cast<const float*>(scales.data.get())[form < 2 ? n : n * blocks + block];
        floats[k * columns + n] = (element(values, k, n) - point) * (has_scales ? scale : 1);
      }
  }

  std::array<OrtValue*, 3> inputs() {
    return {&values, has_scales ? &scales : nullptr, has_zero_points ? &zero_points : nullptr};
  }
};

/// Rarely puts other floats in the place of a tensor, mostly of another size; whether it did.
bool spoil(std::vector<OrtValue*> values) {
  OrtValue* value = values[pick(0, values.size() - 1)];
  if (!value || !rarely()) return false;
  OrtValue other = floats(value->shape.sizes);
  int64_t& size = other.shape.sizes[pick(0, other.shape.sizes.size() - 1)];
  size += pick(-1, 1);
  *value = floats(other.shape.sizes);
  return true;
}

/// One product, compared with the sum of its terms.
bool product() {
  const int64_t depth = pick(0, 1) ? pick(1, 600) : 32 * pick(1, 5), columns = pick(1, 300), rows = pick(1, 9);
  const bool turned = pick(0, 1), largest = pick(0, 9) == 0;
  OrtKernelInfo info{{{"turned", turned}}, -1, {}, 1};
  RandomMatrix matrix(depth, columns, turned, largest);
  OrtValue x = largest ? all_of({rows, depth}, 1) : floats({rows, depth}), bias = floats({columns});
  const auto [values, scales, zero_points] = matrix.inputs();
  info.inputs = {&x, values, scales, zero_points, pick(0, 1) ? &bias : nullptr};
  const bool biased = info.inputs.back();
  const bool sound = !spoil(info.inputs);
  OrtKernelContext context{{}, std::vector<OrtValue>(1), {true}, 4};
  if (!run(operators()[6], info, context)) return false;
  const float* y = reinterpret_cast<const float*>(context.outputs[0].data.get());
  for (int64_t r = 0; sound && r < rows; ++r)
    for (int64_t n = 0; n < columns; ++n) {
      double wanted = biased ? reinterpret_cast<float*>(bias.data.get())[n] : 0, size = 1;
      for (int64_t k = 0; k < depth; ++k) {
        const double term = double(reinterpret_cast<float*>(x.data.get())[r * depth + k]) *
                            matrix.floats[k * columns + n];
        wanted += term, size += std::fabs(term);
      }
      if (!(std::fabs(y[r * columns + n] - wanted) < 1e-4 * size)) {
        std::printf("a product is wrong: K %ld N %ld rows %ld\n", depth, columns, rows);
        std::exit(1);
      }
    }
  return true;
}

/// One look-up, compared with the rows of the table.
bool rows() {
  const int64_t width = pick(1, 140), size = pick(1, 50), batch = pick(1, 3), length = pick(1, 9);
  OrtKernelInfo info{{{"turned", 1}, {"width", width + (rarely() ? pick(-40, 40) : 0)}}, -1, {}, 1};
  RandomMatrix table(width, size, true);
  OrtValue ids = made({batch, length}, sizeof(int64_t));
  ids.shape.type = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  auto* id = reinterpret_cast<int64_t*>(ids.data.get());
  for (int64_t i = 0; i < batch * length; ++i) id[i] = rarely() ? pick(-2, 60) : pick(0, size - 1);
  const auto [values, scales, zero_points] = table.inputs();
  info.inputs = {&ids, values, scales, zero_points};
  spoil({values, scales, zero_points});
  OrtKernelContext context{{}, std::vector<OrtValue>(1), {true}, 4};
  return run(operators()[7], info, context);
}

/// One node of attention, or of a layer around it, with sizes that fit or nearly fit, run once; whether it was
/// computed rather than refused.
bool step(bool whole) {
  const int64_t batch = pick(0, 3) ? pick(1, 2) : pick(3, 14), heads = pick(1, 3);
  const int64_t width = pick(0, 2) ? pick(1, 70) : 16 * pick(1, 8);
  const int64_t length = pick(0, 2)   ? pick(1, 20)
                         : pick(0, 1) ? 1
                                      : pick(100, 300),
                mem_len = pick(0, 3) ? pick(0, 40) : pick(0, 400);
  const int64_t slots = mem_len + length + pick(0, 1) * pick(0, 30),
                rows = pick(0, 1) ? pick(1, 9) : pick(1, mem_len + length);
  OrtKernelInfo info{{{"heads", heads},
                      {"head_dim", width},
                      {"mem_len", mem_len},
                      {"nearest", pick(0, 1)},
                      {"full", pick(0, 1)},
                      {"query_at", pick(0, 3)},
                      {"key_at", pick(0, 3)},
                      {"value_at", pick(0, 2) * heads * width}},
                     pick(0, 3) ? 1e-3f : -1.0f, {}, 19};
  const int64_t model = pick(1, 80), inner = pick(1, 80);  // D and F
  if (whole) info.attributes["pre_norm"] = pick(0, 1);
  const int64_t pitch = heads * width * 3 + 3;
  // Numbers of the ring, the table and the persistent vectors: 0 floats, 1 halves, 2 bytes.
  const int64_t stored = std::max<int64_t>(pick(-1, 2), 0), tabled = pick(0, 2), lasting = pick(0, 2);
  const bool ring = pick(0, 5), by_distance = pick(0, 4), zeros = ring && pick(0, 1);
  const bool persistent = pick(0, 1), gated = info.epsilon > 0 && pick(0, 1);
  const int64_t vectors = pick(0, 3) ? pick(1, 20) : pick(1, 300);
  const OrtCustomOp& op = operators()[stored + (whole ? 3 : 0)];
  std::vector<Sizes> sizes = {{batch, length, heads * width + 3},
                              {batch, length, pitch},
                              {batch, heads, slots, width},
                              {batch, heads, slots, width},
                              {heads, width, rows},
                              {batch, length},
                              {heads, 1, width},
                              {heads, 1, width},
                              {heads, 1, rows},
                              {heads, 1, width},
                              {heads, 1, width},
                              {heads, 1, rows},
                              {heads, 1, rows},
                              {heads, width, vectors},
                              {heads, vectors, width},
                              {heads, 1, vectors},
                              {heads, vectors, 1},
                              {batch, heads, slots, 1},
                              {batch, heads, slots, 1}};
  const bool scaled = persistent && lasting == 2;
  std::vector<bool> given = {true,  true,  ring,  ring,  by_distance,
                             true,  pick(0, 1) > 0, pick(0, 1) > 0, pick(0, 1) > 0,
                             zeros, zeros, gated, by_distance && tabled == 2,
                             persistent, persistent, scaled, scaled,
                             ring && stored == 2, ring && stored == 2};
  const int64_t count_of_inputs = given.size(), last = count_of_inputs - 1;
  const int64_t odd[] = {-1, 0, 1, 7, 1 << 24, (1 << 24) + 1, INT64_MAX, INT64_MIN};
  if (rarely()) std::next(info.attributes.begin(), pick(0, 7))->second = odd[pick(0, 7)];
  if (rarely()) std::next(info.attributes.begin(), pick(0, 7))->second += pick(-3, 3);
  if (rarely()) info.attributes.erase(std::next(info.attributes.begin(), pick(0, 7)));
  if (rarely()) {
    Sizes& some = sizes[pick(0, last)];
    some[pick(0, some.size() - 1)] += pick(-1, 1);
  }
  if (rarely()) {
    Sizes& some = sizes[pick(0, last)];
    some[pick(0, some.size() - 1)] = 0;
  }
  if (rarely()) sizes[pick(0, last)].pop_back();
  if (const int64_t which = pick(2, last); rarely() && which != 5) given[which] = !given[which];

  std::vector<OrtValue> values;
  for (const Sizes& some : sizes) values.push_back(floats(some));
  values[5] = made(sizes[5], sizeof(int64_t));
  const int64_t poisoned = pick(0, 3) ? -1 : pick(0, batch * length - 1),
                row = sizes[0].empty() ? 0 : sizes[0].back();
  if (poisoned >= 0 &&
      sizes[0] == Sizes({batch, length, heads * width + 3}))  // one token's query is not a number
    std::fill_n(reinterpret_cast<float*>(values[0].data.get()) + poisoned * row, row, NAN);
  for (auto [type, first, after] : {std::array{stored, 2l, 4l}, {tabled, 4l, 5l}, {lasting, 13l, 15l}})
    for (int64_t i = first; i < after && type > 0; ++i)
      values[i] = type == 1 ? narrowed(values[i]) : bytes(sizes[i]);
  for (int i : {15, 16, 17, 18}) values[i] = all_of(sizes[i], 1.0f / 127);
  values[11] = all_of(sizes[11], pick(0, 10) * 0.1f);
  if (rarely()) values[pick(13, 14)] = floats(sizes[13]);
  int64_t count = 1;
  for (int64_t size : sizes[5]) count *= size;
  for (int64_t i = 0; i < count; ++i) {  // mostly valid: consecutive, some of them negative
    const int64_t strange[] = {INT64_MAX - 5, INT64_MIN, INT64_MAX, -1, 1ll << 40, pick(0, 1000)};
    reinterpret_cast<int64_t*>(values[5].data.get())[i] =
        pick(0, 3) ? pick(-9, 500) + i : strange[pick(0, 5)];
  }
  OrtKernelContext context{
      {}, std::vector<OrtValue>(5), {true, !rarely(), !rarely(), !rarely(), !rarely()}, size_t(4 >> stored)};
  for (int i = 0; i < count_of_inputs; ++i) info.inputs.push_back(given[i] ? &values[i] : nullptr);
  RandomMatrix projection(model, 3 * heads * width + 6, false), out(heads * width, model, false);
  RandomMatrix expand(model, inner, false), contract(inner, model, false);
  OrtValue x = floats({batch, length, model}), inner_bias = floats({inner});
  std::vector<OrtValue> by_width;  // norms, and the bias of the second product
  for (int i = 0; i < 5; ++i) by_width.push_back(floats({model}));
  if (whole) {
    auto& inputs = info.inputs;
    const auto add = [&](RandomMatrix& matrix, bool values) {
      const auto given = matrix.inputs();
      inputs.insert(inputs.end(), given.begin() + !values, given.end());
    };
    inputs[0] = &x, inputs[1] = projection.inputs()[0];
    add(projection, false), add(out, true);
    inputs.push_back(&by_width[0]), inputs.push_back(&by_width[1]);
    if (pick(0, 2)) {
      add(expand, true), inputs.push_back(&inner_bias), add(contract, true);
      for (int i = 2; i < 5; ++i) inputs.push_back(&by_width[i]);
    }
    spoil({inputs.begin() + 19, inputs.end()});
    spoil({&x, projection.inputs()[0]});
  }
  if (!run(op, info, context)) return false;
  if (whole) return true;
  const OrtValue& answers = context.outputs[0];
  for (int64_t i = 0; i < batch * length * info.attributes["heads"] * info.attributes["head_dim"]; ++i)
    if (i / (info.attributes["heads"] * info.attributes["head_dim"]) != poisoned &&
        !(std::fabs(reinterpret_cast<const float*>(answers.data.get())[i]) <= 1.001f)) {
      std::printf("an answer is no mean of values: B %ld h %ld K %ld T %ld M %ld S %ld\n", batch, heads,
                  width, length, mem_len, slots);
      std::exit(1);  // every value is between -1 and 1
    }
  return true;
}

}  // namespace

int main(int, char** arguments) {
  source.seed(std::atoi(arguments[1]));
  int computed = 0;
  const int count = std::atoi(arguments[2]);
  for (int i = 0; i < count; ++i) computed += i % 3 ? step(i % 3 == 2) : pick(0, 3) ? product() : rows();
  std::printf("%d computed, %d refused\n", computed, count - computed);
}
