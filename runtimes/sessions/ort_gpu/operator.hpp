// Relative attention over a ring memory as one node of ONNX Runtime's CUDA provider: one kernel launch a node.
//
// RingRelativeAttentionOnCuda computes with floats. In RingRelativeAttentionOnCudaOverHalves the ring and the table are
// of halves, and in RingRelativeAttentionOnCudaInHalves all tensors are. Sums are of floats. The kernels are PTX
// (`kernels.hpp`, from xl_export/tensorrt/kernels/ring.py), which NVIDIA's driver compiles when a session opens. The
// driver's library is loaded at run time, so building this needs no CUDA.
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
//
// A node has a kernel for single tokens, in which each query reads all keys by itself, and often one that computes tiles
// of queries on tensor cores; each step takes the one that reads less.
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
  template <class Kernel>
  void* function(const Kernel& kernel) {
    std::lock_guard<std::mutex> lock(guard_);
    void* context = nullptr;
    call("cuCtxGetCurrent", &context);
    void*& found = functions_[{context, kernel.ptx}];
    if (!found) {
      void* module = nullptr;
      try {
        call("cuModuleLoadData", &module, static_cast<const void*>(kernel.ptx));
      } catch (const std::exception& error) {
        throw std::runtime_error(error.what() + std::string("; attention as one node needs compute capability 7.5 and CUDA 12"));
      }
      call("cuModuleGetFunction", &found, module, kernel.name);
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

  int multiprocessors() { return attribute(16); }

  /// 80 for 8.0.
  int compute_capability() { return 10 * attribute(75) + attribute(76); }

  /// Bytes of shared memory of a multiprocessor.
  int shared_bytes() { return attribute(81); }

 private:
  int attribute(int number) {
    int device = 0, value = 0;
    call("cuCtxGetDevice", &device);
    call("cuDeviceGetAttribute", &value, number, device);
    return value;
  }

  CudaDriver() : library_(dlopen("libcuda.so.1", RTLD_NOW)) {
    if (!library_) throw std::runtime_error("NVIDIA's driver libcuda.so.1 cannot be loaded");
  }

  void* library_;
  std::mutex guard_;
  std::map<std::pair<void*, const char*>, void*> functions_;
};

/// Stored: of the ring and the table. Value: of all other tensors.
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
    const int columns[] = {head_dim(), query_at(), key_at(), value_at()};
    const auto multiples_of = [&](int multiple) {
      return std::all_of(std::begin(columns), std::end(columns), [=](int column) { return column % multiple == 0; });
    };
    multiprocessors_ = driver_.multiprocessors();
    const int capability = driver_.compute_capability();
    int64_t most_places = 0, most_queries = 0;
    for (const RingKernel& kernel : RING_KERNELS) {
      Tactic& tactic = kernel.block_t == 1 ? tokens_ : segments_;
      if (tactic.kernel || kernel.halves == IN_FLOATS<Value> || kernel.ring_halves == IN_FLOATS<Stored> ||
          head_dim() > kernel.widest || kernel.oldest > capability || !multiples_of(kernel.multiple))
        continue;
      const int64_t fitting = driver_.shared_bytes() / (kernel.shared_bytes + RESERVED_BYTES);
      tactic = {&kernel, driver_.function(kernel), std::min<int64_t>(kernel.programs, fitting) * multiprocessors_};
      most_places = std::max(most_places, tactic.places);
      most_queries = std::max(most_queries, tactic.places * kernel.block_t);
    }
    expect(tokens_.kernel);
    // If keys are divided, there is a place for every program. Each leaves its queries' answers and their levels; a
    // counter of each tile of queries is back at 0 afterwards.
    scratch_ = driver_.zeros(most_queries * (head_dim() + 1) + most_places);
    levels_ = scratch_ + 4 * most_queries * head_dim();
    counters_ = levels_ + 4 * most_queries;
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
    expect(length * std::max(query.sizes[2], fresh.sizes[2]) <= INT32_MAX && batch * heads() * length <= INT32_MAX);
    expect(table.sizes == Sizes({heads(), table.sizes[1], width}) && columns * table.sizes[1] <= INT32_MAX);
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
    const Tactic& tactic = chosen(batch * heads(), length, query.sizes[2], fresh.sizes[2]);
    const RingKernel& kernel = *tactic.kernel;
    const Division division = divided(tactic, batch * heads(), length);

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
        int(length),
    };
    void* arguments[std::size(tensors) + std::size(numbers)];
    size_t at = 0;
    for (CudaDriver::Address& tensor : tensors) arguments[at++] = &tensor;
    for (int& number : numbers) arguments[at++] = &number;
    driver_.call("cuLaunchKernel", tactic.function, unsigned(batch * heads()), unsigned(division.tiles_of_queries),
                 unsigned(division.parts), unsigned(kernel.threads), 1u, 1u, unsigned(kernel.shared_bytes), stream,
                 static_cast<void**>(arguments), static_cast<void**>(nullptr));
  }

 private:
  static constexpr int64_t MOST_IN_A_GRID = 65535;

  static constexpr int RESERVED_BYTES = 1024;  // of shared memory for each program, by CUDA
  // Keys that a part has at least for each of its queries. Its partial answers, which are written in floats and read
  // again, are then less than half as many bytes as its keys, values and rows of the table.
  static constexpr int64_t KEYS_FOR_A_QUERY = 3;
  // How many times fewer bytes a segment's kernel must read than the one for tokens: it begins with more steps that wait
  // for each other, and a part of the rows of its tiles may be empty.
  static constexpr int64_t GAIN = 2;

  struct Tactic {
    const RingKernel* kernel = nullptr;
    void* function = nullptr;
    int64_t places = 0;  // of programs that run at once
  };

  struct Division {
    int64_t tiles_of_queries, parts;  // of each row and head
    int64_t vectors;                  // that the busiest multiprocessor reads
  };

  /// How a step's work is divided among programs. As many parts of the keys as run at once, rounded down, since a few
  /// programs more would wait for all others. All but the last have the same number of tiles, so none is empty.
  Division divided(const Tactic& tactic, int64_t rows, int64_t length) const {
    const int64_t block_t = tactic.kernel->block_t, block_j = tactic.kernel->block_j, queries = std::min(length, block_t);
    const int64_t tiles_of_queries = (length - 1) / block_t + 1, programs = rows * tiles_of_queries;
    const int64_t tiles = (mem_len() + (full() ? length : queries) - 1) / block_j + 1;
    const int64_t least = std::max<int64_t>(KEYS_FOR_A_QUERY * queries / block_j, 1);
    const int64_t most = std::clamp<int64_t>(tactic.places / programs, 1, std::max<int64_t>(tiles / least, 1));
    const int64_t each = (tiles - 1) / most + 1, parts = (tiles - 1) / each + 1;
    // Key, value and row of the table for each key; the rows for the distances before the first key; partial answers,
    // counted as halves.
    const int64_t vectors = 3 * each * block_j + block_t + (parts > 1 ? 4 * queries : 0);
    return {tiles_of_queries, parts, ((programs * parts - 1) / multiprocessors_ + 1) * vectors};
  }

  const Tactic& chosen(int64_t rows, int64_t length, int64_t query_pitch, int64_t context_pitch) const {
    if (!segments_.kernel || query_pitch % segments_.kernel->multiple || context_pitch % segments_.kernel->multiple)
      return tokens_;
    const bool less = GAIN * divided(segments_, rows, length).vectors <= divided(tokens_, rows, length).vectors;
    return less ? segments_ : tokens_;
  }

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
  int64_t multiprocessors_ = 0;
  Tactic tokens_, segments_;
  CudaDriver::Address scratch_ = 0, levels_ = 0, counters_ = 0;
};

}  // namespace xl
