/* The C interface from C: errors, and the tokens of a text. */
#include <stdio.h>
#include <string.h>

#include "xl_export_c.h"

static int32_t each(void *own, int64_t token, const char *text) {
  (void)token;
  fputs(text, stdout);
  return --*(int *)own > 0;
}

int main(int count, char **arguments) {
  if (count < 3) return 2;
  if (xl_open("/nowhere", 1, NULL) || !strstr(xl_last_error(), "is not an artefact")) return 3;
  if (xl_open(NULL, 1, NULL) || !strstr(xl_last_error(), "a pointer is null")) return 4;
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
  if (!memory || !fork || xl_start(session, 0) || !strstr(xl_last_error(), "batch is 0")) return 8;
  if (xl_predict(session, memory, tokens, xl_segment(session) + 1, NULL) >= 0) return 9;
  float log_probs[64];
  if (xl_score(session, fork, tokens, tokens, length, log_probs) < 0 || xl_positions(fork)[0] != length) return 10;
  xl_generate_options options = {100, 0, 0, 1, 0, NULL};
  int left = 12;
  fputs(prompt, stdout);
  if (xl_generate(session, memory, tokens, length, &options, each, &left) < 0 || left != 0) return 11;
  options.top_p = 2;
  if (xl_generate(session, memory, tokens, length, &options, each, &left) >= 0) return 12;
  puts("");
  xl_free(fork);
  xl_free(memory);
  xl_close(session);
  xl_close(NULL);
  return 0;
}
