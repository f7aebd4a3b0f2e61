// The C interface over the C++ library. Every function catches everything: no exception crosses into C.
#include "xl_export_c.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "xl_export.hpp"

struct xl_session {
  xl_export::Session session;
};

struct xl_memory {
  xl_export::Memory memory;
};

namespace {

using Tokens = xl_export::View<std::int64_t>;

std::string& last_error() {
  thread_local std::string sentence;
  return sentence;
}

// What `work` returns, or `failed` with the sentence kept.
template <class Result, class Work>
Result guarded(Result failed, Work work) noexcept {
  try {
    return work();
  } catch (const std::exception& error) {
    try {
      last_error() = error.what();
    } catch (...) {
      last_error().clear();  // not even the sentence could be kept
    }
  } catch (...) {
    last_error().clear();
  }
  return failed;
}

void require(bool given) {
  if (!given)
    throw xl_export::Error(xl_export::Fault::option,
                           "a pointer is null or a number of elements is negative; "
                           "give what xl_export_c.h asks for.");
}

Tokens view(const std::int64_t* numbers, std::int64_t count) {
  require(count >= 0 && (numbers || count == 0));
  return {numbers, static_cast<std::size_t>(count)};
}

// batch * length numbers; the session refuses a length that does not fit.
Tokens rows(const xl_memory* memory, const std::int64_t* numbers, std::int64_t length) {
  require(memory && length >= 0 && length <= INT64_MAX / memory->memory.batch());
  return view(numbers, length * memory->memory.batch());
}

std::size_t vocabulary(const xl_session* session) {
  return static_cast<std::size_t>(session->session.spec().vocabulary);
}

// Writes what fits, and returns how many there are.
template <class Range, class Element>
std::int64_t written(const Range& range, Element* out, std::int64_t capacity) {
  require(capacity >= 0 && (out || capacity == 0));
  const auto count = static_cast<std::int64_t>(range.size());
  std::copy_n(range.begin(), std::min(count, capacity), out);
  return count;
}

}  // namespace

const char* xl_last_error(void) {
  return last_error().c_str();
}

xl_session* xl_open(const char* folder, std::int32_t threads, const char* fused_library) {
  return guarded<xl_session*>(nullptr, [&] {
    require(folder);
    xl_export::Options options;
    options.threads = threads;
    if (fused_library) options.fused_library = fused_library;
    return new xl_session{xl_export::Session::open(folder, options)};
  });
}

void xl_close(xl_session* session) {
  delete session;
}

std::int64_t xl_vocabulary_size(const xl_session* session) {
  return guarded<std::int64_t>(-1, [&] {
    require(session);
    return session->session.spec().vocabulary;
  });
}

std::int64_t xl_segment(const xl_session* session) {
  return guarded<std::int64_t>(-1, [&] {
    require(session);
    return session->session.spec().segment;
  });
}

std::int32_t xl_check(const xl_session* session, double* max_difference) {
  return guarded<std::int32_t>(-1, [&] {
    require(session);
    const xl_export::Report report = xl_export::check(session->session);
    if (max_difference) *max_difference = report.max_difference;
    return report.passed() ? 1 : 0;
  });
}

std::int64_t xl_encode(const xl_session* session, const char* text, std::int64_t num_bytes,
                       std::int64_t* tokens, std::int64_t capacity) {
  return guarded<std::int64_t>(-1, [&] {
    require(session && num_bytes >= 0 && (text || num_bytes == 0));
    const std::string_view given(text ? text : "", static_cast<std::size_t>(num_bytes));
    return written(session->session.vocabulary().encode(given), tokens, capacity);
  });
}

std::int64_t xl_decode(const xl_session* session, const std::int64_t* tokens, std::int64_t count, char* text,
                       std::int64_t capacity) {
  return guarded<std::int64_t>(-1, [&] {
    require(session);
    const Tokens given = view(tokens, count);
    return written(session->session.vocabulary().decode({given.begin(), given.end()}), text, capacity);
  });
}

xl_memory* xl_start(const xl_session* session, std::int64_t batch) {
  return guarded<xl_memory*>(nullptr, [&] {
    require(session);
    return new xl_memory{session->session.start(batch)};
  });
}

xl_memory* xl_copy(const xl_memory* memory) {
  return guarded<xl_memory*>(nullptr, [&] {
    require(memory);
    return new xl_memory{memory->memory.copy()};
  });
}

void xl_free(xl_memory* memory) {
  delete memory;
}

std::int64_t xl_batch(const xl_memory* memory) {
  return guarded<std::int64_t>(-1, [&] {
    require(memory);
    return memory->memory.batch();
  });
}

std::int64_t* xl_positions(xl_memory* memory) {
  return guarded<std::int64_t*>(nullptr, [&] {
    require(memory);
    return memory->memory.positions.data();
  });
}

std::int32_t xl_step(const xl_session* session, xl_memory* memory, const std::int64_t* tokens,
                     std::int64_t length, float* logits) {
  return guarded<std::int32_t>(-1, [&] {
    require(session && logits);
    const Tokens given = rows(memory, tokens, length);
    session->session.step(given, memory->memory, {logits, given.size() * vocabulary(session)});
    return 0;
  });
}

std::int32_t xl_predict(const xl_session* session, xl_memory* memory, const std::int64_t* tokens,
                        std::int64_t length, float* logits) {
  return guarded<std::int32_t>(-1, [&] {
    require(session && logits);
    const Tokens given = rows(memory, tokens, length);
    const auto batch = static_cast<std::size_t>(memory->memory.batch());
    session->session.predict(given, memory->memory, {logits, batch * vocabulary(session)});
    return 0;
  });
}

std::int32_t xl_score(const xl_session* session, xl_memory* memory, const std::int64_t* tokens,
                      const std::int64_t* targets, std::int64_t length, float* log_probs) {
  return guarded<std::int32_t>(-1, [&] {
    require(session && log_probs);
    const Tokens given = rows(memory, tokens, length), wanted = rows(memory, targets, length);
    session->session.score(given, wanted, memory->memory, {log_probs, given.size()});
    return 0;
  });
}

xl_generate_options xl_default_options(const xl_session* session) {
  const xl_export::Sampler own = session ? session->session.sampler() : xl_export::Sampler{};
  xl_generate_options options{};
  options.max_tokens = 100;
  options.temperature = own.temperature;
  options.top_k = own.top_k;
  options.top_p = own.top_p;
  options.min_p = own.min_p;
  options.repetition_penalty = own.repetition_penalty;
  options.presence_penalty = own.presence_penalty;
  options.frequency_penalty = own.frequency_penalty;
  return options;
}

std::int32_t xl_generate(const xl_session* session, xl_memory* memory, const std::int64_t* prompt,
                         std::int64_t count, const xl_generate_options* options, xl_each each, void* own) {
  return guarded<std::int32_t>(-1, [&] {
    require(session && memory && options && each);
    xl_export::GenerateOptions chosen;
    chosen.max_tokens = options->max_tokens;
    xl_export::Sampler& sampler = chosen.sampler.emplace();
    sampler.temperature = options->temperature;
    sampler.top_k = options->top_k;
    sampler.top_p = options->top_p;
    sampler.min_p = options->min_p;
    sampler.repetition_penalty = options->repetition_penalty;
    sampler.presence_penalty = options->presence_penalty;
    sampler.frequency_penalty = options->frequency_penalty;
    chosen.seed = options->seed;
    if (options->stop) chosen.stop.emplace_back(options->stop);
    xl_export::generate(session->session, memory->memory, view(prompt, count), chosen,
                        [&](const xl_export::Piece& piece) {
                          const auto num_bytes = static_cast<std::int64_t>(piece.text.size());
                          return each(own, piece.token, piece.text.c_str(), num_bytes) != 0;
                        });
    return 0;
  });
}

std::int32_t xl_save(const xl_memory* memory, const char* path) {
  return guarded<std::int32_t>(-1, [&] {
    require(memory && path);
    xl_export::save(memory->memory, path);
    return 0;
  });
}

xl_memory* xl_load(const xl_session* session, const char* path, std::int32_t adopt) {
  return guarded<xl_memory*>(nullptr, [&] {
    require(session && path);
    return new xl_memory{xl_export::load(session->session, path, adopt != 0)};
  });
}
