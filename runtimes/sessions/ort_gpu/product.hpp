// Products with weights as nodes of ONNX Runtime's CUDA provider, with the work around them:
//
//     y = activation(norm(x) · Wᵀ + bias) + norm(residual)
//
// ProductOnCuda computes with floats, and all tensors of ProductOnCudaInHalves are of halves; sums are of floats. A step
// of few rows (at most 8) is one launch, whose program reads each weight once and computes both norms. With more rows
// the norms of a row would be computed again by every program, and cuBLAS multiplies faster: it is called on the handle
// of ONNX Runtime, and one more launch computes what is behind the product, and the norm for the nodes that read y. The
// kernels are PTX, as in `operator.hpp`.
//
// inputs   0 x          [B, T, K]
//          1 matrix     [N, K]     W
//          2 bias       [N]
//          3 residual   [B, T, N]
//          4, 5         [K]        weight and bias of x's norm
//          6            [B, T, K]  norm(x), which is read in place of x if there are many rows
//          7, 8, 9      [N], [N], [B, T, N]  the same of the residual
//         10, 11        [N]        weight and bias of the norm with which other nodes read y
// outputs  0 y          [B, T, N]
//          1            [B, T, N]  norm(y), which is written only if there are many rows; with the inputs 10 and 11
// attributes: relu, and float epsilon of the norms. The inputs from 2 on are optional. K is a multiple of 16 bytes.
#pragma once

#include "operator.hpp"

namespace xl {

/// The product of cuBLAS, which ONNX Runtime's CUDA provider has loaded.
class Cublas {
 public:
  static Cublas& get(const OrtApi& ort) {
    static Cublas library(ort);
    return library;
  }

  /// y [rows, columns] = x [rows, depth] · matrixᵀ, all in rows. halves: the type of all three.
  void multiply(void* handle, const void* x, const void* matrix, void* y, int rows, int columns, int depth, bool halves,
                bool tf32) const {
    constexpr int AS_IT_IS = 0, TRANSPOSED = 1, FLOATS = 0, HALVES = 2, IN_FLOATS = 68, IN_TF32 = 77, BY_DEFAULT = -1;
    const int type = halves ? HALVES : FLOATS;
    const float one = 1, zero = 0;
    // cuBLAS has columns where we have rows, so it computes yᵀ = matrix · xᵀ.
    const int code = gemm_(handle, TRANSPOSED, AS_IT_IS, columns, rows, depth, &one, matrix, type, depth, x, type, depth,
                           &zero, y, type, columns, tf32 ? IN_TF32 : IN_FLOATS, BY_DEFAULT);
    if (code) throw std::runtime_error("cuBLAS reports error " + std::to_string(code) + " in cublasGemmEx");
  }

 private:
  using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int,
                       const void*, void*, int, int, int, int);

  explicit Cublas(const OrtApi& ort) {
    // The one of the provider, which is next to ONNX Runtime: PyTorch may have loaded another release, and its functions
    // do not know the provider's handle.
    Dl_info runtime{};
    dladdr(reinterpret_cast<const void*>(ort.CreateStatus), &runtime);
    const std::string file = runtime.dli_fname ? runtime.dli_fname : "";
    const std::string provider = file.substr(0, file.rfind('/') + 1) + "libonnxruntime_providers_cuda.so";
    for (const char* name : {provider.c_str(), "libcublas.so.13", "libcublas.so.12"})
      if (void* library = gemm_ ? nullptr : dlopen(name, RTLD_NOW | RTLD_NOLOAD))
        gemm_ = reinterpret_cast<Gemm>(dlsym(library, "cublasGemmEx"));
    if (!gemm_) throw std::runtime_error("ONNX Runtime has loaded no cuBLAS of CUDA 12 or 13");
  }

  Gemm gemm_ = nullptr;
};

/// Value: of all tensors.
template <class Value>
class CudaProduct : public Node {
 public:
  using Ring = Value;
  static constexpr ONNXTensorElementDataType VALUES = TYPE_OF<Value>;
  static constexpr size_t INPUTS = 12, OUTPUTS = 2;
  static bool has_any_type(size_t) { return true; }

  CudaProduct(const OrtApi& ort, const OrtKernelInfo* info)
      : Node(ort, info), driver_(CudaDriver::get()), cublas_(Cublas::get(ort)) {
    relu_ = attribute(info, "relu") != 0;
    epsilon_ = attribute(info, "epsilon", 0);
    for (const ProductKernel& kernel : PRODUCT_KERNELS)
      if (kernel.halves == HALVES)
        kernels_.push_back({&kernel, driver_.function(kernel)});
  }

  void compute(OrtKernelContext* context) const {
    constexpr size_t RANKS[INPUTS] = {3, 2, 1, 3, 1, 1, 3, 1, 1, 3, 1, 1};
    Tensor given[INPUTS];
    size_t inputs = 0;
    check(ort.KernelContext_GetInputCount(context, &inputs));
    for (size_t i = 0; i < std::min(inputs, INPUTS); ++i) {
      const OrtValue* value = nullptr;
      check(ort.KernelContext_GetInput(context, i, &value));
      given[i] = checked(tensor_of(value), RANKS[i]);
      expect(!given[i].data || given[i].type == VALUES);
    }
    const auto& [x, matrix, bias, residual, weight, added, normed_x, residual_weight, residual_added, normed_residual,
                 next_weight, next_added] = given;
    const int64_t batch = x.sizes[0], length = x.sizes[1], depth = x.sizes[2], columns = matrix.sizes[0];
    const int64_t rows = batch * length;
    expect(matrix.sizes == Sizes({columns, depth}) && depth * sizeof(Value) % 16 == 0 && rows <= INT32_MAX);
    for (const Tensor* by_column : {&bias, &residual_weight, &residual_added, &next_weight, &next_added})
      expect(!by_column->data || by_column->sizes == Sizes({columns}));
    for (const Tensor* by_depth : {&weight, &added}) expect(!by_depth->data || by_depth->sizes == Sizes({depth}));
    for (const Tensor* result : {&residual, &normed_residual})
      expect(!result->data || result->sizes == Sizes({batch, length, columns}));
    expect(!weight.data == !added.data && !weight.data == !normed_x.data);
    expect(!normed_x.data || normed_x.sizes == x.sizes);
    expect(!residual_weight.data == !residual_added.data && !residual_weight.data == !normed_residual.data);
    expect(!residual_weight.data || residual.data);
    expect(!next_weight.data == !next_added.data);

    void* stream = nullptr;
    check(ort.KernelContext_GetGPUComputeStream(context, &stream));
    void* y = output(context, 0, {batch, length, columns});
    void* normed_y = next_weight.data ? output(context, 1, {batch, length, columns}) : nullptr;
    const int N = static_cast<int>(columns), K = static_cast<int>(depth);
    for (const auto& [kernel, function] : kernels_)
      if (rows <= kernel->rows)
        return launch(*kernel, function, (N - 1) / kernel->columns + 1, stream, address(x.data), address(matrix.data),
                      address(bias.data), address(residual.data), address(weight.data), address(added.data),
                      address(residual_weight.data), address(residual_added.data), address(y), static_cast<int>(rows), K,
                      N, int{bias.data != nullptr}, int{residual.data != nullptr}, int{weight.data != nullptr},
                      int{residual_weight.data != nullptr}, int{relu_}, epsilon_);

    const Tensor& factors = normed_x.data ? normed_x : x;
    const Tensor& term = normed_residual.data ? normed_residual : residual;
    const bool tf32 = resource(context, USES_TF32) != nullptr;
    cublas_.multiply(resource(context, CUBLAS_HANDLE), factors.data, matrix.data, y, static_cast<int>(rows), N, K, HALVES, tf32);
    if (!bias.data && !term.data && !relu_ && !normed_y) return;
    const auto& [kernel, function] = kernels_.back();
    launch(*kernel, function, static_cast<unsigned>(rows), stream, address(y), address(bias.data), address(term.data),
           address(next_weight.data), address(next_added.data), address(normed_y), N, int{bias.data != nullptr},
           int{term.data != nullptr}, int{normed_y != nullptr}, int{relu_}, epsilon_);
  }

 private:
  static constexpr bool HALVES = !IN_FLOATS<Value>;
  static constexpr int CUBLAS_HANDLE = 10002, USES_TF32 = 10011;  // of ONNX Runtime's enum CudaResource

  static CudaDriver::Address address(const void* data) { return reinterpret_cast<CudaDriver::Address>(data); }

  /// What ONNX Runtime has for the stream of a step; null if it has none.
  void* resource(OrtKernelContext* context, int which) const {
    constexpr int VERSION = 3;
    void* found = nullptr;
    if (OrtStatus* absent = ort.KernelContext_GetResource(context, VERSION, which, &found)) ort.ReleaseStatus(absent);
    return found;
  }

  template <class... Arguments>
  void launch(const ProductKernel& kernel, void* function, unsigned programs, void* stream, Arguments... arguments) const {
    void* all[] = {&arguments...};
    driver_.call("cuLaunchKernel", function, programs, 1u, 1u, unsigned(kernel.threads), 1u, 1u,
                 unsigned(kernel.shared_bytes), stream, static_cast<void**>(all), static_cast<void**>(nullptr));
  }

  CudaDriver& driver_;
  const Cublas& cublas_;
  bool relu_;
  float epsilon_;
  std::vector<std::pair<const ProductKernel*, void*>> kernels_;  // those for few rows first, and the fewest before them
};

}  // namespace xl
