/* The C interface from C: every function once, and what each refuses. It continues a text after its prompt, and
   saves three streams and one: plain ARTEFACT PROMPT THREE ONE. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xl_export_c.h"

static int32_t each(void *own, int64_t token, const char *text, int64_t num_bytes) {
  (void)token;
  if (text[num_bytes] != 0) return 0;
  fwrite(text, 1, (size_t)num_bytes, stdout);
  return --*(int *)own > 0;
}

static int says(const char *words) { return strstr(xl_last_error(), words) != NULL; }

int main(int count, char **arguments) {
  if (count < 5) return 2;
  if (xl_open("/nowhere", 1, NULL) || !says("is not an artefact")) return 3;
  if (xl_open(NULL, 1, NULL) || !says("a pointer is null")) return 4;
  xl_session *session = xl_open(arguments[1], 1, NULL);
  if (!session) return 5;
  int64_t tokens[64];
  const char *prompt = arguments[2];
  int64_t length = xl_encode(session, prompt, (int64_t)strlen(prompt), tokens, 64);
  if (length < 1 || length > 64) return 6;
  char text[256];
  int64_t size = xl_decode(session, tokens, length, text, sizeof text);
  if (size != (int64_t)strlen(prompt) || memcmp(text, prompt, (size_t)size) != 0) return 7;
  xl_memory *memory = xl_start(session, 1), *fork = xl_copy(memory);
  if (!memory || !fork || xl_start(session, 0) || !says("batch is 0")) return 8;
  int64_t vocabulary = xl_vocabulary_size(session), segment = xl_segment(session);
  if (vocabulary < 1 || length > segment || xl_batch(memory) != 1) return 9;

  /* Steps: one answer for each token, the last one alone, and log-probabilities agree. */
  float *all = malloc(sizeof(float) * (size_t)(length * vocabulary)), *last = malloc(sizeof(float) * (size_t)vocabulary);
  if (!all || !last || xl_step(session, fork, tokens, length, all) < 0 || xl_positions(fork)[0] != length) return 10;
  xl_free(fork);
  if (!(fork = xl_copy(memory)) || xl_predict(session, fork, tokens, length, last) < 0) return 11;
  for (int64_t at = 0; at < vocabulary; ++at)
    if (all[(length - 1) * vocabulary + at] != last[at]) return 12;
  if (xl_predict(session, memory, tokens, segment + 1, last) >= 0 || !says("the segment has")) return 13;
  if (xl_step(session, memory, tokens, 1, NULL) >= 0 || !says("a pointer is null")) return 14;
  xl_free(fork);
  float log_probs[64];
  if (!(fork = xl_copy(memory)) || xl_score(session, fork, tokens, tokens, length, log_probs) < 0) return 15;
  double sum = 0;
  for (int64_t at = 0; at < vocabulary; ++at) sum += exp(all[at]);
  if (fabs(log_probs[0] - (all[tokens[0]] - log(sum))) > 1e-4) return 16;

  /* Streams in a file: their number is asked for, and they go on alike. */
  xl_memory *three = xl_start(session, 3);
  int64_t fed[3];
  for (int row = 0; row < 3; ++row) fed[row] = tokens[row % length];
  float *answers = malloc(sizeof(float) * (size_t)(3 * vocabulary)), *again = malloc(sizeof(float) * (size_t)(3 * vocabulary));
  if (!three || !answers || !again || xl_predict(session, three, fed, 1, answers) < 0) return 17;
  if (xl_save(three, arguments[3]) < 0 || xl_save(three, "/nowhere/streams") >= 0 || !says("could not be written")) return 18;
  xl_memory *loaded = xl_load(session, arguments[3], 0);
  if (!loaded || xl_batch(loaded) != 3 || xl_positions(loaded)[2] != 1) return 19;
  if (xl_load(session, "/nowhere/streams", 0) || !says("is no file")) return 20;
  if (xl_predict(session, three, fed, 1, answers) < 0 || xl_predict(session, loaded, fed, 1, again) < 0) return 21;
  if (memcmp(answers, again, sizeof(float) * (size_t)(3 * vocabulary)) != 0) return 22;

  xl_generate_options options = xl_default_options(session);
  options.temperature = 0;
  int left = 12;
  fputs(prompt, stdout);
  if (xl_generate(session, memory, tokens, length, &options, each, &left) < 0 || left != 0) return 23;
  options.top_p = 2;
  if (xl_generate(session, memory, tokens, length, &options, each, &left) >= 0 || !says("top_p is 2")) return 24;
  puts("");

  /* What is not there is refused with a sentence: each needs the sentence of its own call. */
  if (xl_start(session, 0) || xl_vocabulary_size(NULL) >= 0 || !says("a pointer is null")) return 25;
  if (xl_start(session, 0) || xl_segment(NULL) >= 0 || !says("a pointer is null")) return 26;
  if (xl_start(session, 0) || xl_positions(NULL) || !says("a pointer is null")) return 27;
  if (xl_start(session, 0) || xl_batch(NULL) >= 0 || !says("a pointer is null")) return 28;
  free(all), free(last), free(answers), free(again);
  xl_free(loaded), xl_free(three), xl_free(fork);
  xl_close(session);
  xl_close(NULL);
  if (xl_save(memory, arguments[4]) < 0 || xl_batch(memory) != 1) return 29; /* a memory outlives its session */
  if (!(three = xl_copy(memory))) return 30;
  xl_free(three), xl_free(memory);
  return 0;
}
