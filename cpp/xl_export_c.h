/* The C interface: artefacts of xl-export for every language that can call C.

   A function that can fail returns NULL or a negative number, and xl_last_error() then has one sentence that
   says what was given, what was expected, and how to fix it. No exception leaves this library. Every text is
   UTF-8. Several threads may use one session; a memory is for one thread at a time. */
#ifndef XL_EXPORT_C_H
#define XL_EXPORT_C_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#pragma GCC visibility push(default) /* everything else of the library stays hidden */
#endif

typedef struct xl_session xl_session;
typedef struct xl_memory xl_memory;

/* The sentence of the last error of this thread, valid until this thread's next failing call; empty before
   any. */
const char* xl_last_error(void);

/* Opens an artefact, every hash verified. threads: 0 leaves the number to ONNX Runtime. fused_library: the
   file of the fused operator, or NULL for the one that is built in, if there is one, or else the standard
   operators. The first call sets the environment variable ORT_DISABLE_TELEMETRY unless it is set. Set it yourself,
   to 1, before other threads start that may read the environment. */
xl_session* xl_open(const char* folder, int32_t threads, const char* fused_library);
void xl_close(xl_session* session);

int64_t xl_vocabulary_size(const xl_session* session);
int64_t xl_segment(const xl_session* session); /* the most tokens of one step */

/* Replays the reference. Returns 1 where every answer is within the limits, 0 where one is not. */
int32_t xl_check(const xl_session* session, double* max_difference);

/* The tokens of a text. Writes at most `capacity` of them and returns how many there are. */
int64_t xl_encode(const xl_session* session, const char* text, int64_t num_bytes, int64_t* tokens,
                  int64_t capacity);

/* The text of some tokens. Writes at most `capacity` bytes and returns how many there are; no zero at the
 * end. */
int64_t xl_decode(const xl_session* session, const int64_t* tokens, int64_t count, char* text,
                  int64_t capacity);

/* The memory of new streams, and a fork of all of them. A memory may outlive its session, and can then still
   be copied, saved and freed. */
xl_memory* xl_start(const xl_session* session, int64_t batch);
xl_memory* xl_copy(const xl_memory* memory);
void xl_free(xl_memory* memory);

/* How many streams a memory has. */
int64_t xl_batch(const xl_memory* memory);

/* The positions [batch] of the next tokens. Setting one to 0 starts a new text in its row. */
int64_t* xl_positions(xl_memory* memory);

/* Feed one segment, tokens [batch, length], where batch is xl_batch(memory); 0 or a negative number.
   xl_step: logits [batch, length, vocabulary] after every token. xl_predict: logits [batch, vocabulary] after
   the last tokens. xl_score: log p [batch, length] of targets in nats, 0 where a target is -1. */
int32_t xl_step(const xl_session* session, xl_memory* memory, const int64_t* tokens, int64_t length,
                float* logits);
int32_t xl_predict(const xl_session* session, xl_memory* memory, const int64_t* tokens, int64_t length,
                   float* logits);
int32_t xl_score(const xl_session* session, xl_memory* memory, const int64_t* tokens, const int64_t* targets,
                 int64_t length, float* log_probs);

typedef struct {
  int64_t max_tokens;
  double temperature;        /* 0 takes the likeliest token */
  int64_t top_k;             /* 0 for all */
  double top_p;              /* 1 for all */
  double min_p;              /* 0 for all */
  double repetition_penalty; /* 1 for none */
  double presence_penalty;   /* 0 for none */
  double frequency_penalty;  /* 0 for none */
  uint64_t seed;
  const char* stop; /* a string that ends the text, or NULL */
} xl_generate_options;

/* The options that the artefact recommends: its own sampling, 100 tokens, seed 0, no stop string. */
xl_generate_options xl_default_options(const xl_session* session);

/* Called with each token and the num_bytes bytes of text that it adds; returns 0 to stop. A zero
   follows the text, which may hold zeros too. It must return: an exception must not pass through it. */
typedef int32_t (*xl_each)(void* own, int64_t token, const char* text, int64_t num_bytes);

/* Continues one stream after a prompt, any number of tokens. Returns 0 or a negative number. */
int32_t xl_generate(const xl_session* session, xl_memory* memory, const int64_t* prompt, int64_t count,
                    const xl_generate_options* options, xl_each each, void* own);

/* Streams in files that the Python package continues, and the other way round. The file decides
   the number of streams, which sizes every array: ask xl_batch() before any other call. Streams that other
   weights computed, such as those before the model was fine-tuned, are refused unless `adopt` is not 0. */
int32_t xl_save(const xl_memory* memory, const char* path);
xl_memory* xl_load(const xl_session* session, const char* path, int32_t adopt);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif

#endif
