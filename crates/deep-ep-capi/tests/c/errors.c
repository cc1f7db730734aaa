/*
 * What a program may do wrong: it gets an error that says what, and goes on. On any number of ranks, all of
 * which do the same, but for what only the last one does.
 */
#define DEEP_EP_NO_SHORT_NAMES
#include "example.h"

#if defined FP8 || defined BF16 || defined FP32
#error "there should be no short names"
#endif

enum { TOKENS = 3, HIDDEN = 16, TOP_K = 2 };

static size_t rank, ranks;

/* That the call failed so, and that the message names `word`. */
#define FAILS(expected, word, call)                                                          \
  do {                                                                                       \
    deep_ep_status_t status_ = (call);                                                       \
    if (status_ != (expected) || strstr(deep_ep_last_error(), (word)) == NULL) {             \
      fprintf(stderr, "%s:%d: %s returned %s: %s\n", __FILE__, __LINE__, #call,              \
              deep_ep_status_name(status_), deep_ep_last_error());                           \
      exit(1);                                                                               \
    }                                                                                        \
  } while (0)

static uint16_t x[TOKENS * HIDDEN];
static int64_t topk_idx[TOKENS * TOP_K];

static deep_ep_dispatch_input_t good_input(void) {
  deep_ep_dispatch_input_t in = deep_ep_dispatch_input();
  for (size_t i = 0; i < TOKENS * TOP_K; i++) topk_idx[i] = (int64_t)(i % (2 * ranks));
  in.x = deep_ep_tensor_2d(x, DEEP_EP_BF16, TOKENS, HIDDEN);
  in.topk_idx = deep_ep_tensor_2d(topk_idx, DEEP_EP_INT64, TOKENS, TOP_K);
  in.num_experts = 2 * ranks;
  return in;
}

/* The buffer is still usable. */
static void still_works(deep_ep_buffer_t *buffer) {
  deep_ep_dispatch_input_t in = good_input();
  deep_ep_dispatched_t got = deep_ep_dispatched();
  CALL(deep_ep_dispatch(buffer, &in, NULL, &got));
  uint16_t sums[TOKENS * HIDDEN];
  deep_ep_combine_input_t back = deep_ep_combine_input();
  back.loan = got.loan;
  back.handle = got.handle;
  deep_ep_combine_output_t out = deep_ep_combine_output();
  out.x = deep_ep_tensor_2d(sums, DEEP_EP_BF16, TOKENS, HIDDEN);
  CALL(deep_ep_combine(buffer, &back, &out));
  CALL(deep_ep_dispatched_free(&got));
}

/* Arguments that the call cannot have; all ranks pass the same, so all see their own error. */
static void unusable_inputs(deep_ep_buffer_t *buffer) {
  deep_ep_dispatched_t got = deep_ep_dispatched();
  deep_ep_dispatch_input_t in = good_input();
  FAILS(DEEP_EP_EINVAL, "input", deep_ep_dispatch(buffer, NULL, NULL, &got));
  FAILS(DEEP_EP_EINVAL, "result", deep_ep_dispatch(buffer, &in, NULL, NULL));
  in.struct_size = 0;
  FAILS(DEEP_EP_EINVAL, "struct_size", deep_ep_dispatch(buffer, &in, NULL, &got));
  in = good_input();
  memset(&in.x, 0, sizeof in.x);
  FAILS(DEEP_EP_EINVAL, "x is absent", deep_ep_dispatch(buffer, &in, NULL, &got));
  in = good_input();
  in.x.data = NULL;
  FAILS(DEEP_EP_EINVAL, "x is at address", deep_ep_dispatch(buffer, &in, NULL, &got));
  in = good_input();
  in.x.data = (char *)x + 1;
  FAILS(DEEP_EP_EINVAL, "multiple of 2", deep_ep_dispatch(buffer, &in, NULL, &got));
  in = good_input();
  in.x.dtype = 99;
  FAILS(DEEP_EP_EINVAL, "element type 99", deep_ep_dispatch(buffer, &in, NULL, &got));
  in = good_input();
  in.x.ndim = 7;
  FAILS(DEEP_EP_EINVAL, "dimensions", deep_ep_dispatch(buffer, &in, NULL, &got));
  in = good_input();
  in.x.shape[1] = 3;
  FAILS(DEEP_EP_EINVAL, "x", deep_ep_dispatch(buffer, &in, NULL, &got));
  in = good_input();
  in.x.shape[0] = TOKENS - 1;
  FAILS(DEEP_EP_EINVAL, "topk_idx", deep_ep_dispatch(buffer, &in, NULL, &got));
  in = good_input();
  in.topk_idx.dtype = DEEP_EP_FP32;
  FAILS(DEEP_EP_EINVAL, "topk_idx", deep_ep_dispatch(buffer, &in, NULL, &got));
  in = good_input();
  in.num_experts = 2 * ranks + 1;
  if (ranks > 1) FAILS(DEEP_EP_EINVAL, "num_experts", deep_ep_dispatch(buffer, &in, NULL, &got));
  in = good_input();
  topk_idx[3] = 1000;
  FAILS(DEEP_EP_EINVAL, "topk_idx[1, 1] is 1000", deep_ep_dispatch(buffer, &in, NULL, &got));
  in = good_input();
  in.handle = (const deep_ep_handle_t *)buffer;
  FAILS(DEEP_EP_EINVAL, "deep_ep_handle_t", deep_ep_dispatch(buffer, &in, NULL, &got));
  CHECK(got.handle == NULL && got.loan == NULL);
  still_works(buffer);
}

/* A struct of an older or newer header. */
static void other_sizes(deep_ep_buffer_t *buffer) {
  struct {
    deep_ep_dispatch_input_t known;
    size_t later;
  } newer;
  deep_ep_dispatched_t got = deep_ep_dispatched();
  newer.known = good_input();
  newer.later = 0;
  newer.known.struct_size = sizeof newer;
  CALL(deep_ep_dispatch(buffer, &newer.known, NULL, &got));
  CALL(deep_ep_dispatched_free(&got));
  newer.later = 1;
  FAILS(DEEP_EP_EINVAL, "version", deep_ep_dispatch(buffer, &newer.known, NULL, &got));
  deep_ep_dispatch_input_t older = good_input();
  older.struct_size = offsetof(deep_ep_dispatch_input_t, stream);
  CALL(deep_ep_dispatch(buffer, &older, NULL, &got));
  CALL(deep_ep_dispatched_free(&got));
}

/* What only one rank does wrong; the others are told. */
static void one_rank(deep_ep_buffer_t *buffer) {
  deep_ep_dispatch_input_t in = good_input();
  deep_ep_dispatched_t got = deep_ep_dispatched();
  const int blame = rank == ranks - 1;
  if (blame) {
    FAILS(DEEP_EP_EINVAL, "input is NULL", deep_ep_dispatch(buffer, NULL, NULL, &got));
  } else {
    FAILS(DEEP_EP_EPEER_REJECTED, "input is NULL", deep_ep_dispatch(buffer, &in, NULL, &got));
    deep_ep_error_t error = deep_ep_error();
    CALL(deep_ep_last_error_details(&error));
    CHECK(error.status == DEEP_EP_EPEER_REJECTED && error.rank == (int64_t)ranks - 1);
    CHECK(strcmp(error.argument, "input") == 0 && strcmp(error.value, "NULL") == 0);
  }
  if (blame) {
    CALL(deep_ep_refuse(buffer, DEEP_EP_CALL_DISPATCH, "batch", "torn", "must be whole"));
  } else {
    FAILS(DEEP_EP_EPEER_REJECTED, "batch is torn, but it must be whole",
          deep_ep_dispatch(buffer, &in, NULL, &got));
  }
  /* A size that differs. */
  in.x.shape[1] = blame && ranks > 1 ? HIDDEN / 2 : HIDDEN;
  in.x.strides[0] = HIDDEN;
  in.x.strides[1] = 1;
  if (ranks > 1) FAILS(DEEP_EP_ESETTINGS_DIFFER, "bytes of a row", deep_ep_dispatch(buffer, &in, NULL, &got));
  still_works(buffer);
}

/* Calls that are finished wrongly, twice, or not at all. */
static void pending_calls(deep_ep_buffer_t *buffer) {
  deep_ep_dispatch_input_t in = good_input();
  deep_ep_dispatched_t got = deep_ep_dispatched();
  deep_ep_combine_output_t out = deep_ep_combine_output();
  uint16_t sums[TOKENS * HIDDEN];
  out.x = deep_ep_tensor_2d(sums, DEEP_EP_BF16, TOKENS, HIDDEN);
  deep_ep_pending_t *pending;
  CALL(deep_ep_dispatch_begin(buffer, &in, &pending));
  FAILS(DEEP_EP_EINVAL, "a dispatch", deep_ep_combine_finish(pending, &out));
  FAILS(DEEP_EP_EINVAL, "result", deep_ep_dispatch_finish(pending, NULL, NULL));
  deep_ep_received_counts_t counts;
  CALL(deep_ep_dispatch_counts(pending, &counts));
  CHECK(counts.num_ranks == ranks && counts.num_local_experts == 2);
  CALL(deep_ep_dispatch_finish(pending, NULL, &got));
  deep_ep_dispatched_t again = deep_ep_dispatched();
  FAILS(DEEP_EP_EINVAL, "finished before", deep_ep_dispatch_finish(pending, NULL, &again));
  CALL(deep_ep_dispatch_counts(pending, &counts)); /* were asked for before */
  CALL(deep_ep_pending_free(pending));
  FAILS(DEEP_EP_EINVAL, "freed", deep_ep_pending_free(pending));
  FAILS(DEEP_EP_EINVAL, "freed", deep_ep_dispatch_finish(pending, NULL, &again));

  /* Begun and given up: each rank's own business, and the next call works. */
  deep_ep_combine_input_t back = deep_ep_combine_input();
  back.loan = got.loan;
  FAILS(DEEP_EP_EINVAL, "handle", deep_ep_combine_begin(buffer, &back, &pending));
  back.handle = got.handle;
  back.x = got.x;
  FAILS(DEEP_EP_EINVAL, "loan", deep_ep_combine_begin(buffer, &back, &pending));
  memset(&back.x, 0, sizeof back.x);
  CALL(deep_ep_combine_begin(buffer, &back, &pending));
  void *data;
  FAILS(DEEP_EP_EINVAL, "begun", deep_ep_loan_write(got.loan, &data));
  CALL(deep_ep_pending_free(pending));
  CALL(deep_ep_loan_write(got.loan, &data));
  CHECK(data == got.x.data);

  /* An output that does not fit. */
  CALL(deep_ep_combine_begin(buffer, &back, &pending));
  out.x.shape[1] = HIDDEN / 2;
  FAILS(DEEP_EP_EINVAL, "combined_x", deep_ep_combine_finish(pending, &out));
  CALL(deep_ep_pending_free(pending));
  CALL(deep_ep_dispatched_free(&got));
  CALL(deep_ep_dispatched_free(&got)); /* nothing is left in it */
  still_works(buffer);
}

/* Objects are freed in the wrong order: what is needed stays. */
static void order_of_frees(deep_ep_communicator_t *communicator) {
  deep_ep_buffer_t *buffer;
  CALL(deep_ep_buffer_create(communicator, NULL, &buffer));
  deep_ep_dispatch_input_t in = good_input();
  for (size_t i = 0; i < TOKENS * HIDDEN; i++) x[i] = (uint16_t)(i + 1);
  deep_ep_dispatched_t got = deep_ep_dispatched();
  deep_ep_layout_t *layout;
  CALL(deep_ep_get_dispatch_layout(buffer, &in.topk_idx, in.num_experts, NULL, &layout));
  in.layout = layout;
  deep_ep_pending_t *pending;
  CALL(deep_ep_dispatch_begin(buffer, &in, &pending));
  CALL(deep_ep_layout_free(layout));
  CALL(deep_ep_communicator_barrier(communicator));
  CALL(deep_ep_buffer_free(buffer));
  CALL(deep_ep_dispatch_finish(pending, NULL, &got));
  CALL(deep_ep_communicator_barrier(communicator));
  CALL(deep_ep_pending_free(pending));
  FAILS(DEEP_EP_EINVAL, "deep_ep_buffer_t", deep_ep_buffer_free(buffer));
  FAILS(DEEP_EP_EINVAL, "deep_ep_buffer_t", deep_ep_buffer_barrier(buffer));
  /* Rows and handle outlive the buffer. */
  deep_ep_handle_tensors_t tensors = deep_ep_handle_tensors();
  CALL(deep_ep_handle_get_tensors(got.handle, &tensors));
  const int32_t *source = (const int32_t *)tensors.recv_src_idx.data;
  for (size_t row = 0; row < got.counts.output_rows; row++) {
    const uint16_t *found = (const uint16_t *)got.x.data + row * HIDDEN;
    CHECK(memcmp(found, x + (size_t)source[row] * HIDDEN, HIDDEN * sizeof *x) == 0);
  }
  /* A combine's handle and loan are freed while it runs, on another buffer than the dispatch's. */
  CALL(deep_ep_buffer_create(communicator, NULL, &buffer));
  deep_ep_combine_input_t back = deep_ep_combine_input();
  back.loan = got.loan;
  back.handle = got.handle;
  CALL(deep_ep_combine_begin(buffer, &back, &pending));
  CALL(deep_ep_dispatched_free(&got));
  uint16_t sums[TOKENS * HIDDEN];
  deep_ep_combine_output_t out = deep_ep_combine_output();
  out.x = deep_ep_tensor_2d(sums, DEEP_EP_BF16, TOKENS, HIDDEN);
  CALL(deep_ep_combine_finish(pending, &out));
  CALL(deep_ep_pending_free(pending));
  CALL(deep_ep_communicator_barrier(communicator));
  CALL(deep_ep_buffer_free(buffer));
}

/* Calls that make nothing. */
static void null_pointers(deep_ep_buffer_t *buffer) {
  size_t n;
  deep_ep_loan_t *loan;
  deep_ep_communicator_t *communicator;
  deep_ep_tensor_t view;
  const size_t shape[2] = {2, 8};
  CALL(deep_ep_buffer_free(NULL));
  CALL(deep_ep_communicator_free(NULL));
  CALL(deep_ep_pending_free(NULL));
  CALL(deep_ep_handle_free(NULL));
  CALL(deep_ep_low_latency_handle_free(NULL));
  CALL(deep_ep_layout_free(NULL));
  CALL(deep_ep_loan_free(NULL));
  FAILS(DEEP_EP_EINVAL, "buffer is NULL", deep_ep_buffer_rank(NULL, &n));
  FAILS(DEEP_EP_EINVAL, "rank is NULL", deep_ep_buffer_rank(buffer, NULL));
  FAILS(DEEP_EP_EINVAL, "communicator is NULL", deep_ep_communicator_size(NULL, &n));
  FAILS(DEEP_EP_EINVAL, "communicator is NULL", deep_ep_buffer_create(NULL, NULL, &buffer));
  FAILS(DEEP_EP_EINVAL, "all_gather is NULL",
        deep_ep_communicator_from_all_gather(0, 1, NULL, NULL, &communicator));
  FAILS(DEEP_EP_EINVAL, "shape", deep_ep_loan(buffer, DEEP_EP_BF16, NULL, 2, &loan));
  FAILS(DEEP_EP_EINVAL, "dtype", deep_ep_loan(buffer, 0, shape, 2, &loan));
  FAILS(DEEP_EP_EINVAL, "loan is NULL", deep_ep_loan(buffer, DEEP_EP_BF16, shape, 2, NULL));
  FAILS(DEEP_EP_EINVAL, "loan is NULL", deep_ep_loan_tensor(NULL, &view));
  FAILS(DEEP_EP_EINVAL, "enable_shrink", deep_ep_low_latency_update_mask_buffer(buffer, 0, 1));
  FAILS(DEEP_EP_EINVAL, "call", deep_ep_refuse(buffer, 17, "a", "b", "c"));
  CHECK(strcmp(deep_ep_status_name(-5), "unknown status") == 0);
  CALL(deep_ep_clean_low_latency_buffer(buffer, 1, 8, 2));
  CALL(deep_ep_buffer_check(buffer));
}

int main(void) {
  deep_ep_communicator_t *communicator;
  deep_ep_buffer_t *buffer;
  CHECK(deep_ep_last_error()[0] == 0);
  CALL(deep_ep_communicator_from_env(&communicator));
  CALL(deep_ep_communicator_rank(communicator, &rank));
  CALL(deep_ep_communicator_size(communicator, &ranks));
  deep_ep_buffer_config_t config = deep_ep_buffer_config();
  config.engine = 42;
  FAILS(DEEP_EP_EINVAL, "engine is 42", deep_ep_buffer_create(communicator, &config, &buffer));
  config = deep_ep_buffer_config();
  config.timeout_seconds = rank == ranks - 1 ? -1 : 60;
  FAILS(rank == ranks - 1 ? DEEP_EP_EINVAL : DEEP_EP_EPEER_REJECTED, "",
        deep_ep_buffer_create(communicator, &config, &buffer));
  CALL(deep_ep_buffer_create(communicator, NULL, &buffer));
  null_pointers(buffer);
  unusable_inputs(buffer);
  other_sizes(buffer);
  one_rank(buffer);
  pending_calls(buffer);
  CALL(deep_ep_buffer_barrier(buffer));
  CALL(deep_ep_buffer_free(buffer));
  order_of_frees(communicator);
  CALL(deep_ep_communicator_free(communicator));
  if (rank == 0) printf("errors are errors\n");
  return 0;
}
