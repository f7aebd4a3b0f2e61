// Relative attention over a ring memory as one node of ONNX Runtime's CUDA provider: one kernel launch a node.
//
// RingRelativeAttentionOnCuda computes with floats, RingRelativeAttentionOnCudaOverHalves has a ring of halves, and in
// RingRelativeAttentionOnCudaInHalves all tensors are of halves. Sums are of floats. The kernels are PTX (`kernels.hpp`,
// from xl_export/tensorrt/kernels/ring.py), which NVIDIA's driver compiles when a session opens. The driver's library is
// loaded at run time, so building this needs no CUDA.
//
// inputs   0 query      [B, T, …]     a token's row holds the queries of all heads, from column `query_at`
//          1 context    [B, T, …]     likewise its new keys from `key_at` and its values from `value_at`
//          2 keys       [B, h, S, K]  the ring
//          3 values     [B, h, S, K]  the same
//          4 table      [h, R, K]     r(d) by distance; distances of R and more use the last row
//          5 positions  int64 [B, T]  of the tokens; consecutive in each row
//          6 u, 7 v     [h, 1, K]
//          8 bias       [h, 1, R]     is added to the scores; R is its own
//          9, 10        [h, N, K]     persistent keys and values; a node may have neither
//         11, 12        [h, 1, K]     the key and the value of every token before the stream, which are attended to;
//                                     without them nothing before the stream is seen
// outputs  0 answers    [B, T, h·K]
//          1 keys       [B, h, S, K]  the ring with the new tokens, bound to the same buffer as input 2
//          2 values     [B, h, S, K]  the same for input 3
// attributes: heads, head_dim, mem_len, nearest, full, query_at, key_at, value_at. K and the columns are multiples of 4.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "../fused_cpu/node.hpp"
#include "kernels.hpp"

namespace xl {

/// NVIDIA's driver, whose functions are found by name.
class CudaDriver {
 public:
  using Address = unsigned long long;

  static CudaDriver& get() {
    static CudaDriver driver;
    return driver;
  }

  /// Calls a function of the driver, and throws unless it succeeds.
  template <class... Arguments>
  void call(const char* name, Arguments... arguments) {
    void* function = dlsym(library_, name);
    if (!function) throw std::runtime_error(std::string("NVIDIA's driver has no ") + name);
    if (const int code = reinterpret_cast<int (*)(Arguments...)>(function)(arguments...))
      throw std::runtime_error("NVIDIA's driver reports error " + std::to_string(code) + " in " + name);
  }

  /// A kernel's function in the current context, compiled once for each context.
  void* function(const RingKernel& kernel) {
    std::lock_guard<std::mutex> lock(guard_);
    void* context = nullptr;
    call("cuCtxGetCurrent", &context);
    void*& found = functions_[{context, &kernel}];
    if (!found) {
      void* module = nullptr;
      try {
        call("cuModuleLoadData", &module, static_cast<const void*>(kernel.ptx));
      } catch (const std::exception& error) {
        throw std::runtime_error(error.what() + std::string("; attention as one node needs compute capability 7.5 and CUDA 12"));
      }
      call("cuModuleGetFunction", &found, module, "ring_attention");
    }
    return found;
  }

  /// Memory on the device, all zeros.
  Address zeros(size_t words) {
    Address address = 0;
    call("cuMemAlloc_v2", &address, 4 * words);
    call("cuMemsetD32_v2", address, 0u, words);
    call("cuCtxSynchronize");  // the session's stream does not wait for this one
    return address;
  }

  int multiprocessors() {
    constexpr int MULTIPROCESSOR_COUNT = 16;
    int device = 0, count = 0;
    call("cuCtxGetDevice", &device);
    call("cuDeviceGetAttribute", &count, MULTIPROCESSOR_COUNT, device);
    return count;
  }

 private:
  CudaDriver() : library_(dlopen("libcuda.so.1", RTLD_NOW)) {
    if (!library_) throw std::runtime_error("NVIDIA's driver libcuda.so.1 cannot be loaded");
  }

  void* library_;
  std::mutex guard_;
  std::map<std::pair<void*, const RingKernel*>, void*> functions_;
};

/// Value: of all tensors but the ring.
template <class Value, class Stored>
class CudaAttention : public Node {
 public:
  using Ring = Stored;
  static constexpr ONNXTensorElementDataType VALUES = TYPE_OF<Value>;
  static constexpr size_t INPUTS = 13, OUTPUTS = 3;
  static bool has_any_type(size_t) { return false; }

  CudaAttention(const OrtApi& ort, const OrtKernelInfo* info) : Node(ort, info), driver_(CudaDriver::get()) {
    int at = 0;
    for (const char* name : {"heads", "head_dim", "mem_len", "nearest", "full", "query_at", "key_at", "value_at"}) {
      const int64_t value = attribute(info, name);
      expect(0 <= value && value <= LARGEST_SIZE);
      attributes_[at++] = static_cast<int>(value);
    }
    expect(heads() > 0 && head_dim() > 0);
    for (int column : {head_dim(), query_at(), key_at(), value_at()}) expect(column % 4 == 0);
    for (const RingKernel& kernel : RING_KERNELS)
      if (!kernel_ && kernel.halves == !IN_FLOATS<Value> && kernel.ring_halves == !IN_FLOATS<Stored> &&
          head_dim() <= kernel.widest)
        kernel_ = &kernel;
    expect(kernel_);
    function_ = driver_.function(*kernel_);
    places_ = PROGRAMS_EACH * driver_.multiprocessors();
    // If keys are divided, there is a place for every program. Each leaves an answer and its level; a counter of
    // each query is back at 0 afterwards.
    scratch_ = driver_.zeros(places_ * (head_dim() + 2));
    levels_ = scratch_ + 4 * places_ * head_dim();
    counters_ = levels_ + 4 * places_;
  }

  ~CudaAttention() {
    try {
      driver_.call("cuMemFree_v2", scratch_);
    } catch (const std::exception&) {  // the driver ends before the process does
    }
  }

  void compute(OrtKernelContext* context) const {
    Tensor given[INPUTS];
    size_t inputs = 0;
    check(ort.KernelContext_GetInputCount(context, &inputs));
    for (size_t i = 0; i < std::min(inputs, INPUTS); ++i) {
      const OrtValue* value = nullptr;
      check(ort.KernelContext_GetInput(context, i, &value));
      given[i] = checked(tensor_of(value), i == 5 ? 2 : i == 2 || i == 3 ? 4 : 3);
      expect(given[i].data || i > 8);
    }
    const auto& [query, fresh, keys, values, table, positions, u, v, bias, own_keys, own_values, initial_key,
                 initial_value] = given;
    const int64_t batch = query.sizes[0], length = query.sizes[1], slots = keys.sizes[2], width = head_dim();
    const int64_t columns = heads() * width, vectors = own_keys.data ? own_keys.sizes[1] : 0;
    expect(keys.sizes == Sizes({batch, heads(), slots, width}) && values.sizes == keys.sizes);
    expect(fresh.sizes[0] == batch && fresh.sizes[1] == length && positions.sizes == Sizes({batch, length}));
    expect(mem_len() + length <= slots && slots * width <= INT32_MAX && length <= MOST_IN_A_GRID);
    expect(query.sizes[2] % 4 == 0 && query_at() + columns <= query.sizes[2]);
    expect(fresh.sizes[2] % 4 == 0 && std::max(key_at(), value_at()) + columns <= fresh.sizes[2]);
    expect(length * fresh.sizes[2] <= INT32_MAX && batch * heads() * length <= INT32_MAX);
    expect(table.sizes == Sizes({heads(), table.sizes[1], width}));
    expect(bias.sizes == Sizes({heads(), 1, bias.sizes[2]}));
    expect(u.sizes == Sizes({heads(), 1, width}) && v.sizes == u.sizes);
    expect(!own_keys.data == !own_values.data);
    expect(!vectors || (own_keys.sizes == Sizes({heads(), vectors, width}) && own_values.sizes == own_keys.sizes));
    expect(!initial_key.data == !initial_value.data);
    for (const Tensor* initial : {&initial_key, &initial_value}) expect(!initial->data || initial->sizes == u.sizes);

    void* stream = nullptr;
    check(ort.KernelContext_GetGPUComputeStream(context, &stream));
    void* answers = output(context, 0, {batch, length, columns});
    void* ring[2];
    for (int side = 0; side < 2; ++side) {
      const Tensor& past = given[2 + side];
      ring[side] = output(context, 1 + side, past.sizes);
      // Where past and present are not bound to one buffer, all of the past is copied.
      if (ring[side] != past.data)
        driver_.call("cuMemcpyDtoDAsync_v2", address(ring[side]), address(past.data),
                     static_cast<size_t>(batch * heads() * slots * width) * sizeof(Stored), stream);
    }
    const int64_t queries = batch * heads() * length, tiles = (mem_len() + length - 1) / kernel_->block_j + 1;
    // As many parts as run at once, rounded down, since a few programs more would wait for all others. No part is
    // empty: each has this many tiles, except the last one.
    const int64_t each = (tiles - 1) / std::clamp<int64_t>(places_ / queries, 1, tiles) + 1;
    const int64_t parts = (tiles - 1) / each + 1;

    // In the order of the kernel's parameters.
    CudaDriver::Address tensors[] = {
        address(query.data),       address(fresh.data),         address(ring[0]), address(ring[1]), address(positions.data),
        address(table.data),       address(bias.data),          address(u.data),  address(v.data),  address(own_keys.data),
        address(own_values.data),  address(initial_key.data),   address(initial_value.data),
        address(answers),          scratch_,                    levels_,          counters_,
    };
    int numbers[] = {
        heads(),    head_dim(),           int(slots), int(mem_len()), int(table.sizes[1]), int(bias.sizes[2]), int(vectors), int(query.sizes[2]),
        query_at(), int(fresh.sizes[2]),  key_at(),   value_at(),     full(),              nearest(),          !initial_key.data,
    };
    void* arguments[std::size(tensors) + std::size(numbers)];
    size_t at = 0;
    for (CudaDriver::Address& tensor : tensors) arguments[at++] = &tensor;
    for (int& number : numbers) arguments[at++] = &number;
    driver_.call("cuLaunchKernel", function_, unsigned(batch * heads()), unsigned(length), unsigned(parts),
                 unsigned(kernel_->threads), 1u, 1u, unsigned(kernel_->shared_bytes), stream,
                 static_cast<void**>(arguments), static_cast<void**>(nullptr));
  }

 private:
  static constexpr int PROGRAMS_EACH = 4;  // for every multiprocessor
  static constexpr int64_t MOST_IN_A_GRID = 65535;

  static CudaDriver::Address address(const void* data) { return reinterpret_cast<CudaDriver::Address>(data); }

  int heads() const { return attributes_[0]; }
  int head_dim() const { return attributes_[1]; }
  int mem_len() const { return attributes_[2]; }
  int nearest() const { return attributes_[3]; }
  int full() const { return attributes_[4]; }
  int query_at() const { return attributes_[5]; }
  int key_at() const { return attributes_[6]; }
  int value_at() const { return attributes_[7]; }

  CudaDriver& driver_;
  int attributes_[8];
  const RingKernel* kernel_ = nullptr;
  void* function_ = nullptr;
  int64_t places_ = 0;  // of programs that run at once
  CudaDriver::Address scratch_ = 0, levels_ = 0, counters_ = 0;
};

}  // namespace xl
