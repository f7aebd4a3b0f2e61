// The few functions of ONNX Runtime's C interface that a custom operator calls, by their places in its table of functions.
//
// The table only ever grows, so the places hold for every release since 1.17. Declared here so that no header has to be fetched.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ort {

struct Status;
struct Value;
struct Context;
struct Info;
struct Shape;
struct Options;
struct Domain;

constexpr uint32_t VERSION = 17;
constexpr int ANY = 0, FLOAT = 1, INT64 = 7, FLOAT16 = 10;  // of ONNX tensors
constexpr int INVALID_ARGUMENT = 2, NOT_IMPLEMENTED = 9;

struct ApiBase {
  const void* const* (*get_api)(uint32_t version);
  const char* (*get_version)();
};

/// A function of the table by its place.
class Api {
 public:
  explicit Api(const void* const* table) : table_(table) {}
  const void* const* table() const { return table_; }

  Status* status(int code, const char* text) const { return call<0, Status*>(code, text); }
  void release_status(Status* s) const { call<93, void>(s); }
  Status* create_domain(const char* name, Domain** out) const { return call<26, Status*>(name, out); }
  Status* add_to_domain(Domain* domain, const void* op) const { return call<27, Status*>(domain, op); }
  Status* add_domain(Options* options, Domain* domain) const { return call<28, Status*>(options, domain); }
  Status* data(const Value* value, void** out) const { return call<51, Status*>(value, out); }
  Status* type(const Shape* shape, int* out) const { return call<60, Status*>(shape, out); }
  Status* rank(const Shape* shape, size_t* out) const { return call<61, Status*>(shape, out); }
  Status* sizes(const Shape* shape, int64_t* out, size_t count) const { return call<62, Status*>(shape, out, count); }
  Status* shape(const Value* value, Shape** out) const { return call<65, Status*>(value, out); }
  Status* attribute(const Info* info, const char* name, int64_t* out) const { return call<86, Status*>(info, name, out); }
  Status* input(const Context* c, size_t index, const Value** out) const { return call<90, Status*>(c, index, out); }
  Status* output(Context* c, size_t index, const int64_t* sizes, size_t rank, Value** out) const {
    return call<91, Status*>(c, index, sizes, rank, out);
  }
  void release_shape(Shape* s) const { call<99, void>(s); }
  Status* parallel_for(const Context* c, void (*task)(void*, size_t), size_t count, size_t batches, void* data) const {
    return call<274, Status*>(c, task, count, batches, data);
  }

 private:
  template <int PLACE, class Result, class... Arguments>
  Result call(Arguments... arguments) const {
    return reinterpret_cast<Result (*)(Arguments...)>(const_cast<void*>(table_[PLACE]))(arguments...);
  }
  const void* const* table_;
};

/// What ONNX Runtime asks of a custom operator (interface version 17).
struct CustomOp {
  uint32_t version;
  void* (*create_kernel)(const CustomOp*, const void* const* api, const Info*);
  const char* (*name)(const CustomOp*);
  const char* (*provider)(const CustomOp*);
  int (*input_type)(const CustomOp*, size_t);
  size_t (*input_count)(const CustomOp*);
  int (*output_type)(const CustomOp*, size_t);
  size_t (*output_count)(const CustomOp*);
  void (*compute)(void*, Context*);
  void (*destroy)(void*);
  int (*input_characteristic)(const CustomOp*, size_t);  // 0 required, 1 optional
  int (*output_characteristic)(const CustomOp*, size_t);
  int (*input_memory_type)(const CustomOp*, size_t);
  int (*variadic_input_min)(const CustomOp*);
  int (*variadic_input_same)(const CustomOp*);
  int (*variadic_output_min)(const CustomOp*);
  int (*variadic_output_same)(const CustomOp*);
  Status* (*create_kernel_v2)(const CustomOp*, const void* const* api, const Info*, void** kernel);
  Status* (*compute_v2)(void*, Context*);
  Status* (*infer_shapes)(const CustomOp*, void*);
  int (*start_version)(const CustomOp*);
  int (*end_version)(const CustomOp*);
  void* later[8];  // fields of later versions, never read at this one
};

}  // namespace ort
