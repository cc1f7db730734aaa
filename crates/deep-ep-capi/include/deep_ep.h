/*
 * deep_ep.h: expert-parallel dispatch and combine for Mixture-of-Experts models.
 *
 * Written by `cargo xtask header`; do not edit.
 *
 * Dispatch moves each token's row to the ranks that host its experts; combine brings the experts'
 * outputs back and sums them. R ranks, E experts (a multiple of R; rank r hosts experts
 * [r*E/R, (r+1)*E/R)), T tokens of this rank, H elements of a row, K choices of a token, N rows
 * received, M most tokens of a rank in a low-latency call.
 *
 * Errors. Functions return DEEP_EP_OK or why they failed; deep_ep_last_error() has the message and
 * deep_ep_last_error_details() the facts. A rank that cannot make a call tells its peers, whose call
 * then ends with DEEP_EP_EPEER_REJECTED; nobody hangs and the buffer stays usable.
 *
 * Pointers. A pointer argument is NULL or good; where NULL is not allowed it is DEEP_EP_EINVAL.
 * Objects (deep_ep_buffer_t and the like) are numbers that look like pointers: one that was freed, or is
 * of another type, is DEEP_EP_EINVAL, too. Every *_free takes NULL. Objects may be freed in any order:
 * what a call, a handle or a loan needs lives until it is done with.
 *
 * Structs that begin with struct_size are made by the function of their name, which sets all else to
 * 0, the default: deep_ep_dispatch_input_t in = deep_ep_dispatch_input();
 *
 * Memory that a call reads or writes stays as it is until the call is finished; on a GPU, until its
 * work on the stream is done.
 *
 * Threads. Any thread may make any call. Calls on one buffer are made by one thread at a time, and by
 * all ranks in the same order; "local" calls concern this rank only. The last error is the thread's.
 */

#ifndef DEEP_EP_H
#define DEEP_EP_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
/* Version of this header. */
#define DEEP_EP_VERSION_MAJOR 0
#define DEEP_EP_VERSION_MINOR 1
#define DEEP_EP_VERSION_PATCH 0

/* Places of tensors. */
#define DEEP_EP_HOST 0
#define DEEP_EP_CUDA(ordinal) ((int32_t)(ordinal) + 1)

/** Why a function failed. */
typedef enum {
  /** It did not fail. */
  DEEP_EP_OK = 0,
  /**
   * An argument of this call is not usable. Peers end the same call with
   * DEEP_EP_EPEER_REJECTED; the buffer stays usable.
   */
  DEEP_EP_EINVAL = 1,
  /** Another rank rejected the call, so no rows moved. The buffer stays usable. */
  DEEP_EP_EPEER_REJECTED = 2,
  /** Ranks passed different values where they must agree; an error on every rank. */
  DEEP_EP_ESETTINGS_DIFFER = 3,
  /** A wait reached its deadline. Later calls on the buffer fail. */
  DEEP_EP_ETIMEOUT = 4,
  /** Another rank gave up, or this one was interrupted. Later calls on the buffer fail. */
  DEEP_EP_EABORTED = 5,
  /** Ranks are gone before they did their part. */
  DEEP_EP_EPEER_LOST = 6,
  /** The call was given up on this rank: another one was begun before it was finished. */
  DEEP_EP_EABANDONED = 7,
  /** What was asked for exists, but not here. */
  DEEP_EP_EUNSUPPORTED = 8,
  /** Memory could not be had. */
  DEEP_EP_ENOMEM = 9,
  /** The ranks could not find each other, or lost each other while exchanging settings. */
  DEEP_EP_EBOOTSTRAP = 10,
  /** CUDA's driver or compiler refused. */
  DEEP_EP_ECUDA = 11,
  /** The operating system refused. */
  DEEP_EP_EIO = 12,
  /** A fault of this library. Please report it. */
  DEEP_EP_EINTERNAL = 13,
} deep_ep_status;

/** Element types. */
typedef enum {
  /** No tensor. */
  DEEP_EP_NO_TENSOR = 0,
  /** bfloat16. */
  DEEP_EP_BF16 = 1,
  /** IEEE half precision. */
  DEEP_EP_FP16 = 2,
  /** IEEE single precision. */
  DEEP_EP_FP32 = 3,
  /** FP8 E4M3 without infinities. */
  DEEP_EP_FP8 = 4,
  /** Unsigned byte, also for what is 0 or 1. */
  DEEP_EP_UINT8 = 5,
  /** Signed byte. */
  DEEP_EP_INT8 = 6,
  /** 32-bit signed integer. */
  DEEP_EP_INT32 = 7,
  /** 64-bit signed integer. */
  DEEP_EP_INT64 = 8,
} deep_ep_dtype;

/** Which engine moves the rows. */
typedef enum {
  /** As DEEP_EP_ENGINE says, or DEEP_EP_ENGINE_AUTO. */
  DEEP_EP_ENGINE_DEFAULT = 0,
  /** CUDA if a device is set, else the CPU. */
  DEEP_EP_ENGINE_AUTO = 1,
  /** The CPU. */
  DEEP_EP_ENGINE_CPU = 2,
  /** CUDA. */
  DEEP_EP_ENGINE_CUDA = 3,
} deep_ep_engine;

/** A call that all ranks make together, see `deep_ep_refuse()`. */
typedef enum {
  /** deep_ep_dispatch(). */
  DEEP_EP_CALL_DISPATCH = 0,
  /** deep_ep_combine(). */
  DEEP_EP_CALL_COMBINE = 1,
  /** deep_ep_low_latency_dispatch(). */
  DEEP_EP_CALL_LOW_LATENCY_DISPATCH = 2,
  /** deep_ep_low_latency_combine(). */
  DEEP_EP_CALL_LOW_LATENCY_COMBINE = 3,
} deep_ep_call;

/** How rows of a low-latency dispatch travel and arrive. */
typedef enum {
  /** bf16, bit for bit. */
  DEEP_EP_ROWS_BF16 = 0,
  /** FP8 with an fp32 scale for each 128 channels (DeepEP's `use_fp8`). */
  DEEP_EP_ROWS_FP8 = 1,
  /** FP8 with a power of two as the scale, stored as fp32 (`round_scale`). */
  DEEP_EP_ROWS_FP8_ROUND_SCALE = 2,
  /** FP8 with the power's exponent, four in an int32, least significant byte first (`use_ue8m0`). */
  DEEP_EP_ROWS_FP8_UE8M0 = 3,
} deep_ep_row_format;

/** How rows of a low-latency combine travel. */
typedef enum {
  /** One bf16 partial sum for each token and rank. */
  DEEP_EP_WIRE_BF16 = 0,
  /** The same with about 10 bits for each value (DeepEP's `use_logfmt`). */
  DEEP_EP_WIRE_LOGFMT = 1,
  /**
   * One bf16 row for each choice, summed by the owner in fp32 in the order of the choices: the same bits
   * on every engine. Needs `exact_top_k` in the buffer's settings.
   */
  DEEP_EP_WIRE_EXACT = 2,
} deep_ep_wire;

/** Moves rows between the ranks of a communicator. */
typedef struct deep_ep_buffer_t deep_ep_buffer_t;

/** One rank's end of a group of ranks. */
typedef struct deep_ep_communicator_t deep_ep_communicator_t;

/** The routes of a high-throughput dispatch. */
typedef struct deep_ep_handle_t deep_ep_handle_t;

/** Counts and routes of a batch. */
typedef struct deep_ep_layout_t deep_ep_layout_t;

/** Memory of the library that the caller holds until he frees it. */
typedef struct deep_ep_loan_t deep_ep_loan_t;

/** The routes of a low-latency dispatch. */
typedef struct deep_ep_low_latency_handle_t deep_ep_low_latency_handle_t;

/** A call that was begun. */
typedef struct deep_ep_pending_t deep_ep_pending_t;

/** What a function returns: 0, or a value of `deep_ep_status`. */
typedef int32_t deep_ep_status_t;

/**
 * What is known of an error. Texts that do not apply are empty, never NULL. All pointers are good
 * until another call of the same thread fails.
 */
typedef struct {
  /** Set by `deep_ep_error()`. */
  size_t struct_size;
  /** Number of ranks in `ranks`. */
  size_t num_ranks;
  /** The ranks that were waited for, or that are gone. */
  const size_t *ranks;
  /** The rank that rejected or gave up, or that has the other value of a setting; -1: none. */
  int64_t rank;
  /** CUDA's or the operating system's code, 0 if there is none. */
  int64_t code;
  /** How long this rank waited. */
  double waited_seconds;
  /** Status of the call. */
  deep_ep_status_t status;
  /** 0; room for later. */
  int32_t reserved;
  /** The whole message. */
  const char *message;
  /** The argument, setting, feature or purpose that it is about. */
  const char *argument;
  /** Its value. */
  const char *value;
  /** The limit that the value breaks, the other rank's value, or the reason. */
  const char *limit;
  /** The operation, for example `dispatch`. */
  const char *operation;
  /** The stage in it, for example `counts`. */
  const char *stage;
} deep_ep_error_t;

/** Asked now and then by a call that waits, whether it should give up: any other value than 0. */
typedef int32_t (*deep_ep_interrupt_check_t)(void *context);

/** An element type: a value of `deep_ep_dtype`. */
typedef int32_t deep_ep_dtype_t;

/** How processes meet at a TCP port of rank 0. Made by `deep_ep_tcp_config()`. */
typedef struct {
  /** Set by `deep_ep_tcp_config()`. */
  size_t struct_size;
  /** This rank. */
  size_t rank;
  /** Number of ranks. */
  size_t world_size;
  /** This rank's number on its host. */
  size_t local_rank;
  /** Host of rank 0, a name or an address; NULL: 127.0.0.1. */
  const char *address;
  /** Port on which rank 0 listens. */
  uint16_t port;
  /** What all ranks know and nobody else; may be NULL where `address` is of the loopback. */
  const char *secret;
  /** Deadline of meeting and of each exchange; 0: DEEP_EP_TIMEOUT_SECS, or 300. */
  double timeout_seconds;
} deep_ep_tcp_config_t;

/**
 * Sends the `bytes` bytes at `mine` to all ranks, and puts what every rank sent to `all`, in the order
 * of ranks (`bytes` times the number of ranks). All ranks pass the same `bytes`, as to MPI_Allgather.
 * Returns 0, or another value if it failed. Called by one thread at a time, by whatever thread makes
 * a collective call.
 */
typedef int32_t (*deep_ep_all_gather_t)(void *context, const void *mine, size_t bytes, void *all);

/** Fixed capacity of the low-latency calls, the same on all ranks. All zeros: no such calls. */
typedef struct {
  /** Most tokens that a rank sends in a call, `M`. */
  size_t num_max_dispatch_tokens_per_rank;
  /** Elements of a row, `H`. */
  size_t hidden;
  /** Experts over all ranks, `E`. */
  size_t num_experts;
  /**
   * Set to the largest number of choices of a token to make room for combines of
   * DEEP_EP_WIRE_EXACT; 0: there are none.
   */
  size_t exact_top_k;
} deep_ep_low_latency_capacity_t;

/** How a buffer is made. Made by `deep_ep_buffer_config()`; all zeros are the defaults. */
typedef struct {
  /** Set by `deep_ep_buffer_config()`. */
  size_t struct_size;
  /** A value of `deep_ep_engine`. */
  int32_t engine;
  /** DEEP_EP_CUDA(n): the GPU to use. 0: with the CUDA engine the rank's number modulo the GPUs. */
  int32_t device;
  /** Bytes of symmetric memory to start with for the high-throughput calls; it grows. */
  size_t scale_up_bytes;
  /** Most bytes that this rank's symmetric memory may grow to; 0: the machine's memory. */
  size_t max_bytes;
  /** Capacity of the low-latency calls. */
  deep_ep_low_latency_capacity_t low_latency;
  /** Bytes of that capacity, for callers who know only those; 0: not used. */
  size_t low_latency_bytes;
  /** Bound on the SMs, on the CPU engine on the worker threads, of this rank; 0: 20. */
  size_t num_sms;
  /** Deadline of every wait; 0: DEEP_EP_TIMEOUT_SECS, or 300. */
  double timeout_seconds;
  /** Not 0: in low-latency calls, mask a rank that misses its deadline instead of failing. */
  int32_t enable_shrink;
  /** Not 0: CUDA engine, every part of a call is a launch of its own; for compute-sanitizer. */
  int32_t split_launches;
  /** Experts that all ranks must agree on and every call must use; 0: any. */
  size_t num_experts;
  /** Elements of a row that all ranks must agree on and every call must use; 0: any. */
  size_t hidden;
  /** Choices of a token that all ranks must agree on and every call must use; 0: any. */
  size_t top_k;
} deep_ep_buffer_config_t;

/** Bytes copied and memory used by one rank since its buffer was made. On a GPU only memory is counted. */
typedef struct {
  /** Set by `deep_ep_statistics()`. */
  size_t struct_size;
  /** Bytes of rows written by this rank's copies. */
  uint64_t row_bytes_copied;
  /** Bytes of indices, weights and scales copied. */
  uint64_t metadata_bytes_copied;
  /** Bytes that were read to be summed. */
  uint64_t bytes_summed;
  /** Bytes that low-latency calls wrote to peers. */
  uint64_t wire_bytes;
  /** Calls made. */
  uint64_t calls;
  /** Symmetric memory: address range reserved, which costs no memory. */
  uint64_t memory_reserved;
  /** Symmetric memory taken from the system. */
  uint64_t memory_committed;
  /** Symmetric memory in use now. */
  uint64_t memory_in_use;
  /** Most that was in use at once. */
  uint64_t memory_peak;
} deep_ep_statistics_t;

/**
 * A tensor in memory of the host or of a GPU. All zeros is no tensor. Made by
 * `deep_ep_tensor_1d()`, `deep_ep_tensor_2d()` and `deep_ep_tensor_3d()`, or by hand.
 */
typedef struct {
  /**
   * Address of the first element, aligned to the element's size. May be NULL where a dimension is
   * 0.
   */
  void *data;
  /** Element type, a value of `deep_ep_dtype`. */
  deep_ep_dtype_t dtype;
  /** DEEP_EP_HOST, or DEEP_EP_CUDA(n) for the GPU with the number n. */
  int32_t device;
  /** Number of dimensions, 1 to 3. */
  size_t ndim;
  /** Extent of each dimension. */
  size_t shape[3];
  /** Distance between neighbours in each dimension, in elements; all 0 for dense rows. */
  size_t strides[3];
} deep_ep_tensor_t;

/** The tensors of a layout. Made by `deep_ep_layout_tensors()`. */
typedef struct {
  /** Set by `deep_ep_layout_tensors()`. */
  size_t struct_size;
  /** int32 `[R]`: tokens that go to each rank. */
  deep_ep_tensor_t num_tokens_per_rank;
  /** int32 `[nodes]`: tokens that go to each node; no tensor inside one node. */
  deep_ep_tensor_t num_tokens_per_rdma_rank;
  /** int32 `[E]`: choices of each expert. */
  deep_ep_tensor_t num_tokens_per_expert;
  /** uint8 `[T, R]`: 0 or 1. */
  deep_ep_tensor_t is_token_in_rank;
} deep_ep_layout_tensors_t;

/** The tensors and numbers of a handle. Made by `deep_ep_handle_tensors()`. */
typedef struct {
  /** Set by `deep_ep_handle_tensors()`. */
  size_t struct_size;
  /** The rank that it is of. */
  size_t rank;
  /** Number of ranks, `R`. Not read. */
  size_t num_ranks;
  /** Tokens of this rank, `T`. Not read. */
  size_t num_tokens;
  /** Rows that this rank received, `N`; on a GPU the rows of the outputs. Not read. */
  size_t num_recv_tokens;
  /**
   * int32 `[R, R]`: element `[s, rank]` is the inclusive prefix over source ranks of rows received
   * from s.
   */
  deep_ep_tensor_t rank_prefix_matrix;
  /** int32 `[R, 1]`: rows sent to each rank. On the host not read. */
  deep_ep_tensor_t channel_prefix_matrix;
  /** int32 `[R, 1]`: zeros. On the host not read. */
  deep_ep_tensor_t recv_channel_prefix_matrix;
  /** int32 `[N]`, or as many as worst-case outputs have rows: source token of each received row. */
  deep_ep_tensor_t recv_src_idx;
  /** uint8 `[T, R]`: 0 or 1. */
  deep_ep_tensor_t is_token_in_rank;
  /**
   * int32 `[T, R]`: position of the token among the rows that went to the rank, -1 where it did not
   * go. On the host not read.
   */
  deep_ep_tensor_t send_head;
} deep_ep_handle_tensors_t;

/** The tensors and numbers of a low-latency handle. Made by `deep_ep_low_latency_handle_tensors()`. */
typedef struct {
  /** Set by `deep_ep_low_latency_handle_tensors()`. */
  size_t struct_size;
  /** `M`. */
  size_t num_max_dispatch_tokens_per_rank;
  /** `H` of the dispatched rows; a combine may use another. */
  size_t hidden;
  /** `E`. */
  size_t num_experts;
  /** int32 `[E/R, R*M]`: token index at its source of each row. */
  deep_ep_tensor_t src_info;
  /** int64 `[E/R, R]`: first row of each source in the high, number of rows in the low 32 bits. */
  deep_ep_tensor_t layout_range;
} deep_ep_low_latency_handle_tensors_t;

/**
 * What a dispatch sends. Made by `deep_ep_dispatch_input()`. Routes come from `handle` if it is set, else
 * from `layout`, else from `topk_idx` with `num_experts`.
 */
typedef struct {
  /** Set by `deep_ep_dispatch_input()`. */
  size_t struct_size;
  /** `[T, H]` of any element type; a row is a multiple of 16 bytes. Rows may be apart. */
  deep_ep_tensor_t x;
  /**
   * `[T, S]` of a 4-byte type with any strides, travelling with `x`, whose elements then have 1
   * byte; or none.
   */
  deep_ep_tensor_t scales;
  /**
   * int64 or int32 `[T, K]`: global expert ids, negative for no choice. They travel with the rows.
   * Needed without `layout` and `handle`; not allowed with `handle`.
   */
  deep_ep_tensor_t topk_idx;
  /** fp32 `[T, K]`, or none. What stands where there is no choice may be anything. */
  deep_ep_tensor_t topk_weights;
  /** Experts over all ranks, a multiple of the ranks; used with `topk_idx` alone. */
  size_t num_experts;
  /** Routes that were computed before, or NULL. */
  const deep_ep_layout_t *layout;
  /** Routes of an earlier dispatch, or NULL: nothing is counted, no choices travel. */
  const deep_ep_handle_t *handle;
  /** Multiple to which counts per expert are rounded up; 0: 1. */
  size_t expert_alignment;
  /** Outputs have so many rows, and more received rows are an error; 0: as many as come. */
  size_t num_worst_tokens;
  /** Bound on the SMs, or worker threads, of this call; 0: the buffer's. */
  size_t num_sms;
  /**
   * Not 0: outputs will be memory of the caller. Set by `deep_ep_dispatch()`; a hint when the call
   * is begun and finished by itself.
   */
  int32_t into_caller_memory;
  /** 0; room for later. */
  int32_t reserved;
  /** Stream of the GPU that the call is ordered on (a CUstream or cudaStream_t), NULL on the host. */
  void *stream;
} deep_ep_dispatch_input_t;

/** How many rows come. */
typedef struct {
  /** Rows that this rank receives, its own included; -1 where the host does not wait for it. */
  int64_t rows;
  /** Rows that outputs must have: that number, or `num_worst_tokens`. */
  size_t output_rows;
  /** Rows from each source rank, `num_ranks` numbers. */
  const size_t *rows_from;
  /** Numbers in `rows_from`; 0 where `rows` is -1. */
  size_t num_ranks;
  /** Choices of each local expert, rounded up to `expert_alignment`, `num_local_experts` numbers. */
  const size_t *num_recv_tokens_per_expert;
  /** Numbers in `num_recv_tokens_per_expert`; 0 with `num_worst_tokens` and with a handle. */
  size_t num_local_experts;
} deep_ep_received_counts_t;

/**
 * Memory of the caller for what a dispatch receives. Made by `deep_ep_dispatch_output()`. All have
 * `output_rows` rows of the counts.
 */
typedef struct {
  /** Set by `deep_ep_dispatch_output()`. */
  size_t struct_size;
  /** `[N, H]`, of the type of the input. */
  deep_ep_tensor_t x;
  /** `[N, S]`, dense; needed exactly when the input has scales. */
  deep_ep_tensor_t scales;
  /**
   * `[N, K]`, of the type of the input's choices: local expert numbers, -1 for others. May be left
   * out.
   */
  deep_ep_tensor_t topk_idx;
  /** fp32 `[N, K]`, 0 where the index is -1. May be left out. */
  deep_ep_tensor_t topk_weights;
} deep_ep_dispatch_output_t;

/**
 * What a dispatch received. Made by `deep_ep_dispatched()`. Rows are ordered by source rank, then source
 * token.
 */
typedef struct {
  /** Set by `deep_ep_dispatched()`. */
  size_t struct_size;
  /** `[N, H]`: the caller's memory if he passed any, else memory of `loan`. */
  deep_ep_tensor_t x;
  /** `[N, S]`, or none. */
  deep_ep_tensor_t scales;
  /** `[N, K]` local expert numbers, -1 for experts elsewhere or not chosen; or none. */
  deep_ep_tensor_t topk_idx;
  /** fp32 `[N, K]`, 0 where the index is -1; or none. */
  deep_ep_tensor_t topk_weights;
  /** Row counts; its pointers live as long as `handle`. */
  deep_ep_received_counts_t counts;
  /** For the combine, and for dispatching again along the same routes. The caller's to free. */
  deep_ep_handle_t *handle;
  /**
   * The memory of the tensors above, for a combine without a copy; NULL if the caller passed
   * memory. The caller's to free.
   */
  deep_ep_loan_t *loan;
} deep_ep_dispatched_t;

/** What a combine sends back. Made by `deep_ep_combine_input()`. */
typedef struct {
  /** Set by `deep_ep_combine_input()`. */
  size_t struct_size;
  /**
   * `[N, H]` bf16, fp32 or fp16 in the order of the dispatch's rows, in the caller's memory; rows may
   * be apart, and more than N. Or none, if `loan` is set.
   */
  deep_ep_tensor_t x;
  /** The rows in symmetric memory: they are not copied. Or NULL, if `x` is set. */
  const deep_ep_loan_t *loan;
  /** The handle of the dispatch whose rows go back. */
  const deep_ep_handle_t *handle;
  /** fp32 `[N, K]`, summed over ranks for each token; or none. */
  deep_ep_tensor_t topk_weights;
  /** Up to two `[T, H]` tensors of the type of the rows that the sum begins with. */
  deep_ep_tensor_t bias[2];
  /** Bound on the SMs, or worker threads, of this call; 0: the buffer's. */
  size_t num_sms;
  /** Stream of the GPU that the call is ordered on, NULL on the host. */
  void *stream;
} deep_ep_combine_input_t;

/** Memory of the caller for what a combine gives. Made by `deep_ep_combine_output()`. */
typedef struct {
  /** Set by `deep_ep_combine_output()`. */
  size_t struct_size;
  /**
   * `[T, H]`, of the type of the rows: the sum over the ranks that the token went to, ascending, after
   * the bias. Rows may be apart.
   */
  deep_ep_tensor_t x;
  /** fp32 `[T, K]`: the same sum of the weights; needed exactly when the input has weights. */
  deep_ep_tensor_t topk_weights;
} deep_ep_combine_output_t;

/** What a low-latency dispatch sends. Made by `deep_ep_low_latency_dispatch_input()`. */
typedef struct {
  /** Set by `deep_ep_low_latency_dispatch_input()`. */
  size_t struct_size;
  /** bf16 `[T, H]`; rows may be apart. */
  deep_ep_tensor_t x;
  /** int64 or int32 `[T, K]`: global expert ids, negative for no choice. */
  deep_ep_tensor_t topk_idx;
  /** Most tokens of any rank, `M`: outputs have `R*M` rows for each local expert. */
  size_t num_max_dispatch_tokens_per_rank;
  /** Experts over all ranks, `E`. */
  size_t num_experts;
  /** A value of `deep_ep_row_format`. */
  int32_t row_format;
  /**
   * Not 0: nothing is to run between the halves. The CUDA engine makes one launch of both when the call
   * is finished, which is faster, and gives all its errors then. Ranks may differ in it.
   */
  int32_t at_once;
  /** int32 `[E/R]`: rows received for each local expert are added to it; or none. */
  deep_ep_tensor_t cumulative_local_expert_recv_stats;
  /** int64 `[R]`: clock cycles waited for each source rank are added to it; or none. */
  deep_ep_tensor_t dispatch_wait_recv_cost_stats;
  /** Stream of the GPU that the call is ordered on, NULL on the host. */
  void *stream;
} deep_ep_low_latency_dispatch_input_t;

/**
 * Memory of the caller for what a low-latency dispatch receives. Made by
 * `deep_ep_low_latency_dispatch_output()`.
 */
typedef struct {
  /** Set by `deep_ep_low_latency_dispatch_output()`. */
  size_t struct_size;
  /** `[E/R, R*M, H]` bf16, or FP8 with a format of FP8. */
  deep_ep_tensor_t x;
  /**
   * With a format of FP8: fp32 `[E/R, R*M, H/128]`, or int32 `[E/R, R*M, H/512]` with packed
   * exponents; any strides.
   */
  deep_ep_tensor_t scales;
} deep_ep_low_latency_dispatch_output_t;

/** What a low-latency dispatch received. Made by `deep_ep_low_latency_dispatched()`. */
typedef struct {
  /** Set by `deep_ep_low_latency_dispatched()`. */
  size_t struct_size;
  /**
   * `[E/R, R*M, H]`: the rows of local expert `e` are packed from row 0, sources ascending, then source
   * tokens ascending. Rows from `recv_count[e]` on are undefined. The caller's memory if he
   * passed any, else memory of `loan`.
   */
  deep_ep_tensor_t x;
  /**
   * The scales, or none. In memory of `loan` neighbouring rows lie next to each other; the distance
   * of columns is `R*M` rounded up to 4.
   */
  deep_ep_tensor_t scales;
  /** int32 `[E/R]`: rows of each local expert; lives as long as `handle`. */
  deep_ep_tensor_t recv_count;
  /** For the combine. The caller's to free. */
  deep_ep_low_latency_handle_t *handle;
  /** The memory of `x` and `scales`; NULL if the caller passed memory. The caller's to free. */
  deep_ep_loan_t *loan;
} deep_ep_low_latency_dispatched_t;

/** What a low-latency combine sends back. Made by `deep_ep_low_latency_combine_input()`. */
typedef struct {
  /** Set by `deep_ep_low_latency_combine_input()`. */
  size_t struct_size;
  /**
   * bf16 `[E/R, R*M, H]`: outputs of the local experts, rows where the dispatch put them. Or none, if
   * `loan` is set.
   */
  deep_ep_tensor_t x;
  /** That of `deep_ep_get_next_low_latency_combine_buffer()`, for a combine without a copy; or NULL. */
  const deep_ep_loan_t *loan;
  /** Choices of this rank's tokens `[T, K]`, as passed to the dispatch. */
  deep_ep_tensor_t topk_idx;
  /** fp32 `[T, K]`. */
  deep_ep_tensor_t topk_weights;
  /** The handle of the dispatch; it may be used several times. */
  const deep_ep_low_latency_handle_t *handle;
  /** A value of `deep_ep_wire`. */
  int32_t wire;
  /**
   * Not 0: nothing is to run between the halves. The CUDA engine makes one launch of both when the call
   * is finished, which is faster, and gives all its errors then. Ranks may differ in it.
   */
  int32_t at_once;
  /** int64 `[R]`: clock cycles waited for each rank are added to it; or none. */
  deep_ep_tensor_t combine_wait_recv_cost_stats;
  /** Stream of the GPU that the call is ordered on, NULL on the host. */
  void *stream;
} deep_ep_low_latency_combine_input_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The message of the last call of this thread that failed; an empty text if none did. It is good
 * until another call of the same thread fails. Any thread, any time.
 */
const char *deep_ep_last_error(void);

/**
 * Everything that is known of the last call of this thread that failed; `error` was made by
 * `deep_ep_error()`. Its status is DEEP_EP_OK if none failed. Any thread, any time.
 */
deep_ep_status_t deep_ep_last_error_details(deep_ep_error_t *error);

/** The name of a status, for example "DEEP_EP_EINVAL". Any thread, any time. */
const char *deep_ep_status_name(deep_ep_status_t status);

/** Version of the library, for example "0.1.0". Any thread, any time. */
const char *deep_ep_version(void);

/**
 * Lets calls of this thread that wait for other ranks ask `check(context)` about 20 times a second;
 * once it returns another value than 0, the call ends with DEEP_EP_EABORTED, on all ranks. NULL: ask
 * nothing. For programs that must react to Ctrl-C. Concerns the calling thread only.
 */
void deep_ep_set_interrupt_check(deep_ep_interrupt_check_t check,
                                 void *context);

/** Bytes of an element of type `dtype`, 0 for an unknown one. Any thread, any time. */
size_t deep_ep_dtype_size(deep_ep_dtype_t dtype);

/**
 * This process among those of a job, as a launcher's environment describes it: RANK, WORLD_SIZE,
 * LOCAL_RANK, MASTER_ADDR, MASTER_PORT (as `deep-ep launch` and torchrun set them), DEEP_EP_SECRET.
 * Without WORLD_SIZE a group of one. Collective: returns when all ranks are there.
 * `*communicator` is the caller's to free.
 * Any thread, any time.
 */
deep_ep_status_t deep_ep_communicator_from_env(deep_ep_communicator_t **communicator);

/**
 * Processes that meet at a TCP port. Collective. `*communicator` is the caller's to free.
 * Any thread, any time.
 */
deep_ep_status_t deep_ep_communicator_tcp(const deep_ep_tcp_config_t *config,
                                          deep_ep_communicator_t **communicator);

/**
 * `num_ranks` ranks that are threads of this process: `communicators` has room for so many, the n-th
 * is for the thread that plays rank n. Each is the caller's to free. Local.
 * Any thread, any time.
 */
deep_ep_status_t deep_ep_communicator_local(size_t num_ranks,
                                            deep_ep_communicator_t **communicators);

/**
 * Ranks that exchange by the caller's own function, for example over MPI. `context` is passed to it;
 * both must be good until the communicator and all buffers made with it are freed. Deadlines, and
 * noticing that a rank is gone, are that function's business. `*communicator` is the caller's to
 * free. Local.
 * Any thread, any time.
 */
deep_ep_status_t deep_ep_communicator_from_all_gather(size_t rank,
                                                      size_t num_ranks,
                                                      deep_ep_all_gather_t all_gather,
                                                      void *context,
                                                      deep_ep_communicator_t **communicator);

/** This rank. Any thread, any time. */
deep_ep_status_t deep_ep_communicator_rank(const deep_ep_communicator_t *communicator,
                                           size_t *rank);

/** Number of ranks. Any thread, any time. */
deep_ep_status_t deep_ep_communicator_size(const deep_ep_communicator_t *communicator,
                                           size_t *size);

/** This rank's number among those of its host, which says which GPU it uses. Any thread, any time. */
deep_ep_status_t deep_ep_communicator_local_rank(const deep_ep_communicator_t *communicator,
                                                 size_t *local_rank);

/** Sets the deadline of exchanges that begin from now on, on this rank. Any thread, any time. */
deep_ep_status_t deep_ep_communicator_set_timeout(const deep_ep_communicator_t *communicator,
                                                  double timeout_seconds);

/** Returns when every rank has called it. Collective; threads take turns. */
deep_ep_status_t deep_ep_communicator_barrier(const deep_ep_communicator_t *communicator);

/**
 * Sends the `bytes` bytes at `mine` to all ranks; `all` gets what every rank sent, in the order of
 * ranks: `bytes` times the number of ranks. All ranks pass the same `bytes`. Collective; threads take
 * turns.
 */
deep_ep_status_t deep_ep_communicator_all_gather(const deep_ep_communicator_t *communicator,
                                                 const void *mine,
                                                 size_t bytes,
                                                 void *all);

/** Leaves the group, once buffers made with it are freed, too. NULL is allowed. Any thread. */
deep_ep_status_t deep_ep_communicator_free(deep_ep_communicator_t *communicator);

/**
 * Makes a buffer. `config` was made by `deep_ep_buffer_config()`; NULL: defaults. Collective: all ranks
 * make their buffers in the same order. The communicator may be freed afterwards. `*buffer` is the
 * caller's to free.
 * Any thread; one at a time for each communicator.
 */
deep_ep_status_t deep_ep_buffer_create(const deep_ep_communicator_t *communicator,
                                       const deep_ep_buffer_config_t *config,
                                       deep_ep_buffer_t **buffer);

/**
 * Frees a buffer: never waits for a peer. Handles and loans stay good; a call that was begun keeps what
 * it needs until it is finished or freed. NULL is allowed. Any thread.
 */
deep_ep_status_t deep_ep_buffer_free(deep_ep_buffer_t *buffer);

/** This rank. Any thread, any time. */
deep_ep_status_t deep_ep_buffer_rank(const deep_ep_buffer_t *buffer, size_t *rank);

/** Number of ranks. Any thread, any time. */
deep_ep_status_t deep_ep_buffer_num_ranks(const deep_ep_buffer_t *buffer, size_t *num_ranks);

/** `*engine` becomes "cpu" or "cuda", a constant. Any thread, any time. */
deep_ep_status_t deep_ep_buffer_engine(const deep_ep_buffer_t *buffer, const char **engine);

/**
 * Bounds the SMs, on the CPU engine the worker threads, of high-throughput calls that set no bound of
 * their own; 0: the bound that the buffer was made with. Any thread, any time.
 */
deep_ep_status_t deep_ep_buffer_set_num_sms(const deep_ep_buffer_t *buffer,
                                            size_t num_sms);

/**
 * What went wrong on this rank in calls for which nobody has waited, once: on a GPU a call may return
 * before its work is done. Call it after the stream was synchronised. One thread at a time.
 */
deep_ep_status_t deep_ep_buffer_check(const deep_ep_buffer_t *buffer);

/** Grows this rank's symmetric memory to at least `bytes` now. Local. One thread at a time. */
deep_ep_status_t deep_ep_buffer_reserve(const deep_ep_buffer_t *buffer, size_t bytes);

/**
 * Waits for all ranks; with `enable_shrink` a rank that does not come is masked. Collective. One
 * thread at a time.
 */
deep_ep_status_t deep_ep_buffer_barrier(const deep_ep_buffer_t *buffer);

/**
 * Takes part in a call only to tell the peers that this rank cannot make it, because `argument` is
 * `value`, which `limit` ("must be ...") does not allow: they end that call with
 * DEEP_EP_EPEER_REJECTED. `call` is a value of `deep_ep_call`. For callers that find something
 * unusable before they can make the call. One thread at a time.
 */
deep_ep_status_t deep_ep_refuse(const deep_ep_buffer_t *buffer,
                                int32_t call,
                                const char *argument,
                                const char *value,
                                const char *limit);

/** Bytes copied and memory used so far on this rank. Any thread, any time. */
deep_ep_status_t deep_ep_buffer_statistics(const deep_ep_buffer_t *buffer,
                                           deep_ep_statistics_t *statistics);

/**
 * Bytes of landing memory per rank that low-latency calls of these sizes need; for
 * `low_latency_bytes` of the settings. Any thread, any time.
 */
deep_ep_status_t deep_ep_get_low_latency_rdma_size_hint(size_t num_max_dispatch_tokens_per_rank,
                                                        size_t hidden,
                                                        size_t num_ranks,
                                                        size_t num_experts,
                                                        size_t *bytes);

/**
 * Counts where the tokens of `topk_idx` (int64 or int32 `[T, K]`, global expert ids, negative: no
 * choice) go; `num_experts` is a multiple of the ranks. Local. `*layout` is the caller's to free. One
 * thread at a time for each buffer.
 */
deep_ep_status_t deep_ep_get_dispatch_layout(const deep_ep_buffer_t *buffer,
                                             const deep_ep_tensor_t *topk_idx,
                                             size_t num_experts,
                                             void *stream,
                                             deep_ep_layout_t **layout);

/**
 * A layout from its tensors, which on the host are copied; on a GPU the caller keeps them until the
 * layout is freed, and their contents are not looked at. Local. `*layout` is the caller's to free.
 * Any thread, any time.
 */
deep_ep_status_t deep_ep_layout_from_tensors(const deep_ep_layout_tensors_t *tensors,
                                             deep_ep_layout_t **layout);

/** The tensors of a layout, which live as long as it does. Any thread, any time. */
deep_ep_status_t deep_ep_layout_get_tensors(const deep_ep_layout_t *layout,
                                            deep_ep_layout_tensors_t *tensors);

/** Frees a layout; a call that was begun with it keeps it. NULL is allowed. Any thread. */
deep_ep_status_t deep_ep_layout_free(deep_ep_layout_t *layout);

/**
 * A handle from its tensors, which on the host are copied; on a GPU the caller keeps them until the
 * handle is freed, and their contents are not looked at. Valid on any buffer with the same rank and
 * group. Local. `*handle` is the caller's to free. Any thread, any time.
 */
deep_ep_status_t deep_ep_handle_from_tensors(const deep_ep_handle_tensors_t *tensors,
                                             deep_ep_handle_t **handle);

/** The tensors of a handle, which live as long as it does. Any thread, any time. */
deep_ep_status_t deep_ep_handle_get_tensors(const deep_ep_handle_t *handle,
                                            deep_ep_handle_tensors_t *tensors);

/** Frees a handle; a call that was begun with it keeps it. NULL is allowed. Any thread. */
deep_ep_status_t deep_ep_handle_free(deep_ep_handle_t *handle);

/**
 * A low-latency handle from its tensors, which on the host are copied; on a GPU the caller keeps them
 * until the handle is freed, and their contents are not looked at. Local. `*handle` is the caller's
 * to free. Any thread, any time.
 */
deep_ep_status_t deep_ep_low_latency_handle_from_tensors(const deep_ep_low_latency_handle_tensors_t *tensors,
                                                         deep_ep_low_latency_handle_t **handle);

/** The tensors of a low-latency handle, which live as long as it does. Any thread, any time. */
deep_ep_status_t deep_ep_low_latency_handle_get_tensors(const deep_ep_low_latency_handle_t *handle,
                                                        deep_ep_low_latency_handle_tensors_t *tensors);

/** Frees a low-latency handle; a call that was begun with it keeps it. NULL is allowed. Any thread. */
deep_ep_status_t deep_ep_low_latency_handle_free(deep_ep_low_latency_handle_t *handle);

/**
 * A dense tensor in symmetric memory, to be filled and passed to a combine, which then copies nothing.
 * `dtype` is a value of `deep_ep_dtype`, `shape` has `ndim` (1 to 3) numbers. It can be read and
 * written on the host whatever the engine. Local. `*loan` is the caller's to free. One thread at a
 * time for each buffer.
 */
deep_ep_status_t deep_ep_loan(const deep_ep_buffer_t *buffer,
                              deep_ep_dtype_t dtype,
                              const size_t *shape,
                              size_t ndim,
                              deep_ep_loan_t **loan);

/** As `deep_ep_loan()`, where the engine works: on the GPU with the CUDA engine. */
deep_ep_status_t deep_ep_device_loan(const deep_ep_buffer_t *buffer,
                                     deep_ep_dtype_t dtype,
                                     const size_t *shape,
                                     size_t ndim,
                                     deep_ep_loan_t **loan);

/**
 * A bf16 tensor `[E/R, R*M, hidden]` in symmetric memory for the outputs of the experts of `handle`,
 * for a low-latency combine without a copy. Only rows in use take memory. Local. `*loan` is the
 * caller's to free. One thread at a time for each buffer.
 */
deep_ep_status_t deep_ep_get_next_low_latency_combine_buffer(const deep_ep_buffer_t *buffer,
                                                             const deep_ep_low_latency_handle_t *handle,
                                                             size_t hidden,
                                                             deep_ep_loan_t **loan);

/** The tensor of a loan, for reading; it lives as long as the loan. Any thread, any time. */
deep_ep_status_t deep_ep_loan_tensor(const deep_ep_loan_t *loan, deep_ep_tensor_t *tensor);

/**
 * The address of a loan's first element, for writing: waits until no peer reads it any more, as a combine
 * that was given this loan may still be running on another rank. On a GPU it does not wait; work
 * on the buffer's stream is in order. One thread at a time for each loan.
 */
deep_ep_status_t deep_ep_loan_write(const deep_ep_loan_t *loan,
                                    void **data);

/**
 * Gives a loan back; tensors in it are gone. Never waits. A combine that was begun with it keeps it.
 * On a GPU, work on other streams that uses it must be done. NULL is allowed. Any thread.
 */
deep_ep_status_t deep_ep_loan_free(deep_ep_loan_t *loan);

/**
 * Frees a call that was begun; if it was not finished it is abandoned, and peers that wait for this
 * rank's rows end theirs with an error. NULL is allowed. Any thread.
 */
deep_ep_status_t deep_ep_pending_free(deep_ep_pending_t *pending);

/**
 * Begins to send each row to every rank that hosts one of its experts. What `input` names must stay as
 * it is until the call is finished or freed, on a GPU until its work on the stream is done. All
 * ranks make the same calls in the same order. `*pending` is the caller's to free. One thread at a
 * time for each buffer.
 */
deep_ep_status_t deep_ep_dispatch_begin(const deep_ep_buffer_t *buffer,
                                        const deep_ep_dispatch_input_t *input,
                                        deep_ep_pending_t **pending);

/**
 * Waits until it is known how many rows come. The pointers in `*counts` live until `pending` is freed.
 * One thread at a time for each buffer.
 */
deep_ep_status_t deep_ep_dispatch_counts(const deep_ep_pending_t *pending,
                                         deep_ep_received_counts_t *counts);

/**
 * Completes a dispatch: into the memory that `output` names, or, if it is NULL, into a loan. `pending` is
 * used up, also by a failure, but must still be freed. `result` was made by
 * `deep_ep_dispatched()`.
 * One thread at a time for each buffer.
 */
deep_ep_status_t deep_ep_dispatch_finish(const deep_ep_pending_t *pending,
                                         const deep_ep_dispatch_output_t *output,
                                         deep_ep_dispatched_t *result);

/**
 * A whole dispatch: `deep_ep_dispatch_begin()` and `deep_ep_dispatch_finish()`. With memory of the caller
 * `output` must have exactly the rows that come; where that is not known, begin the call and ask
 * for its counts, or pass NULL.
 * One thread at a time for each buffer.
 */
deep_ep_status_t deep_ep_dispatch(const deep_ep_buffer_t *buffer,
                                  const deep_ep_dispatch_input_t *input,
                                  const deep_ep_dispatch_output_t *output,
                                  deep_ep_dispatched_t *result);

/** Frees the handle and the loan of a result, and sets both to NULL. Any thread. */
deep_ep_status_t deep_ep_dispatched_free(deep_ep_dispatched_t *result);

/**
 * Begins to bring rows back to their owners, where they are summed. What `input` names must stay as it
 * is until the call is finished or freed, on a GPU until its work on the stream is done.
 * `*pending` is the caller's to free. One thread at a time for each buffer.
 */
deep_ep_status_t deep_ep_combine_begin(const deep_ep_buffer_t *buffer,
                                       const deep_ep_combine_input_t *input,
                                       deep_ep_pending_t **pending);

/**
 * Completes a combine. `pending` is used up unless `output` itself cannot be read, but must still be
 * freed.
 * One thread at a time for each buffer.
 */
deep_ep_status_t deep_ep_combine_finish(const deep_ep_pending_t *pending,
                                        const deep_ep_combine_output_t *output);

/**
 * A whole combine: `deep_ep_combine_begin()` and `deep_ep_combine_finish()`.
 * One thread at a time for each buffer.
 */
deep_ep_status_t deep_ep_combine(const deep_ep_buffer_t *buffer,
                                 const deep_ep_combine_input_t *input,
                                 const deep_ep_combine_output_t *output);

/**
 * Sends rows to the chosen experts with a fixed capacity. The receive half is
 * `deep_ep_low_latency_dispatch_finish()`, the hook; between the two nothing of this library runs. What
 * `input` names must stay as it is until then, on a GPU until the work on the stream is done.
 * `*pending` is the caller's to free. One thread at a time for each buffer.
 */
deep_ep_status_t deep_ep_low_latency_dispatch_begin(const deep_ep_buffer_t *buffer,
                                                    const deep_ep_low_latency_dispatch_input_t *input,
                                                    deep_ep_pending_t **pending);

/**
 * Receives: into the memory that `output` names, or, if it is NULL, into memory of the library, where rows
 * that nobody sends cost nothing. `pending` is used up, also by a failure, but must still be freed.
 * `result` was made by `deep_ep_low_latency_dispatched()`.
 * One thread at a time for each buffer.
 */
deep_ep_status_t deep_ep_low_latency_dispatch_finish(const deep_ep_pending_t *pending,
                                                     const deep_ep_low_latency_dispatch_output_t *output,
                                                     deep_ep_low_latency_dispatched_t *result);

/**
 * A whole low-latency dispatch: send and receive.
 * One thread at a time for each buffer.
 */
deep_ep_status_t deep_ep_low_latency_dispatch(const deep_ep_buffer_t *buffer,
                                              const deep_ep_low_latency_dispatch_input_t *input,
                                              const deep_ep_low_latency_dispatch_output_t *output,
                                              deep_ep_low_latency_dispatched_t *result);

/** Frees the handle and the memory of a result, and sets both to NULL. Any thread. */
deep_ep_status_t deep_ep_low_latency_dispatched_free(deep_ep_low_latency_dispatched_t *result);

/**
 * Sends expert outputs back to the owners of their tokens. Waits for the peers' sends of the same call,
 * never for their receives. The receive half is `deep_ep_low_latency_combine_finish()`, the hook.
 * What `input` names must stay as it is until then, on a GPU until the work on the stream is done.
 * `*pending` is the caller's to free. One thread at a time for each buffer.
 */
deep_ep_status_t deep_ep_low_latency_combine_begin(const deep_ep_buffer_t *buffer,
                                                   const deep_ep_low_latency_combine_input_t *input,
                                                   deep_ep_pending_t **pending);

/**
 * Receives into `out`, bf16 `[T, H]` of the caller, whose rows may be apart: the sum of each token's expert
 * outputs with the weights of the input. `pending` is used up unless `out` itself cannot be read,
 * but must still be freed.
 * One thread at a time for each buffer.
 */
deep_ep_status_t deep_ep_low_latency_combine_finish(const deep_ep_pending_t *pending,
                                                    const deep_ep_tensor_t *out);

/**
 * A whole low-latency combine: send and receive.
 * One thread at a time for each buffer.
 */
deep_ep_status_t deep_ep_low_latency_combine(const deep_ep_buffer_t *buffer,
                                             const deep_ep_low_latency_combine_input_t *input,
                                             const deep_ep_tensor_t *out);

/**
 * Masks a rank (or, with `masked` 0, takes it back): low-latency calls neither send to it nor wait for it,
 * and choices of its experts are dropped. Needs `enable_shrink`. Local. One thread at a time for each
 * buffer.
 */
deep_ep_status_t deep_ep_low_latency_update_mask_buffer(const deep_ep_buffer_t *buffer,
                                                        size_t rank,
                                                        int32_t masked);

/**
 * Writes to `mask_status`, which has room for `num_ranks` numbers on the host, 1 for each rank that is
 * masked and 0 for the others. Needs `enable_shrink`. Local. Any thread, any time.
 */
deep_ep_status_t deep_ep_low_latency_query_mask_buffer(const deep_ep_buffer_t *buffer,
                                                       int32_t *mask_status,
                                                       size_t num_ranks);

/** Takes all masks back. Needs `enable_shrink`. Local. One thread at a time for each buffer. */
deep_ep_status_t deep_ep_low_latency_clean_mask_buffer(const deep_ep_buffer_t *buffer);

/**
 * There is nothing to clean between low-latency calls. With `enable_shrink` this is a barrier that masks
 * ranks that do not come, as in DeepEP; the numbers are accepted without effect. Collective with
 * `enable_shrink`, else local.
 * One thread at a time for each buffer.
 */
deep_ep_status_t deep_ep_clean_low_latency_buffer(const deep_ep_buffer_t *buffer,
                                                  size_t _num_max_dispatch_tokens_per_rank,
                                                  size_t _hidden,
                                                  size_t _num_experts);

/**
 * Makes the default buffer from the launcher's environment (see `deep_ep_communicator_from_env()`).
 * `config` was made by `deep_ep_buffer_config()`; NULL: defaults. For
 * `deep_ep_low_latency_all_to_all()` its `low_latency` must say how many rows for each rank
 * (`num_max_dispatch_tokens_per_rank`) of how many fp32 (`hidden`) there will be. Collective. An error
 * if there is a default buffer. Any thread; others wait.
 */
deep_ep_status_t deep_ep_init(const deep_ep_buffer_config_t *config);

/**
 * Frees the default buffer, if there is one; a later use makes another one. Calls that run on it are
 * completed. Any thread.
 */
deep_ep_status_t deep_ep_finalize(void);

/**
 * The default buffer, made now if there is none, for all other calls; it is the library's, good until
 * `deep_ep_finalize()`. Collective if there is none. Any thread; others wait.
 */
deep_ep_status_t deep_ep_default_buffer(deep_ep_buffer_t **buffer);

/**
 * Bounds the SMs, on the CPU engine the threads, of high-throughput calls on the default buffer. Local;
 * before the buffer is made, too. Any thread, any time.
 */
deep_ep_status_t deep_ep_set_sm_limit(size_t num_sms);

/**
 * Sends block r of `input` to rank r; block s of `output` becomes what rank s sent. Both have `size` fp32,
 * all blocks together, a multiple of the ranks, and may not overlap. They travel as `dtype` says:
 * DEEP_EP_FP8 with a scale for each 128 of a block (the last group may be short), DEEP_EP_BF16 or
 * DEEP_EP_FP32. All ranks pass the same `size` and `dtype`. Both are on the host, or with the CUDA engine
 * on a GPU, where work on them must be done before the call. On the default buffer, which is made if
 * there is none. Collective; one thread at a time.
 */
deep_ep_status_t deep_ep_all_to_all(const float *input,
                                    float *output,
                                    size_t size,
                                    deep_ep_dtype_t dtype);

/**
 * As `deep_ep_all_to_all()` on the low-latency path: `query` and `result` have `batch_size` rows for each
 * rank, of as many fp32 as `hidden` in the `low_latency` settings that `deep_ep_init()` was given;
 * rows for rank r are the r-th block. They arrive bit for bit. All ranks pass the same `batch_size`,
 * at most `num_max_dispatch_tokens_per_rank` of those settings. Collective; one thread at a time.
 */
deep_ep_status_t deep_ep_low_latency_all_to_all(const float *query,
                                                float *result,
                                                size_t batch_size);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* DEEP_EP_H */

/* A struct of this type with its size set and all else 0. */
#define DEEP_EP_STRUCT(name)                \
  static inline name##_t name(void) {       \
    name##_t made;                          \
    memset(&made, 0, sizeof made);          \
    made.struct_size = sizeof made;         \
    return made;                            \
  }

DEEP_EP_STRUCT(deep_ep_error)
DEEP_EP_STRUCT(deep_ep_tcp_config)
DEEP_EP_STRUCT(deep_ep_buffer_config)
DEEP_EP_STRUCT(deep_ep_statistics)
DEEP_EP_STRUCT(deep_ep_layout_tensors)
DEEP_EP_STRUCT(deep_ep_handle_tensors)
DEEP_EP_STRUCT(deep_ep_low_latency_handle_tensors)
DEEP_EP_STRUCT(deep_ep_dispatch_input)
DEEP_EP_STRUCT(deep_ep_dispatch_output)
DEEP_EP_STRUCT(deep_ep_dispatched)
DEEP_EP_STRUCT(deep_ep_combine_input)
DEEP_EP_STRUCT(deep_ep_combine_output)
DEEP_EP_STRUCT(deep_ep_low_latency_dispatch_input)
DEEP_EP_STRUCT(deep_ep_low_latency_dispatch_output)
DEEP_EP_STRUCT(deep_ep_low_latency_dispatched)
DEEP_EP_STRUCT(deep_ep_low_latency_combine_input)

/* A dense tensor on the host; `dtype` is a value of deep_ep_dtype. */
static inline deep_ep_tensor_t deep_ep_tensor_3d(const void *data, deep_ep_dtype_t dtype, size_t n0,
                                                 size_t n1, size_t n2) {
  deep_ep_tensor_t made;
  memset(&made, 0, sizeof made);
  made.data = (void *)data;
  made.dtype = dtype;
  made.ndim = 3;
  made.shape[0] = n0;
  made.shape[1] = n1;
  made.shape[2] = n2;
  return made;
}

static inline deep_ep_tensor_t deep_ep_tensor_2d(const void *data, deep_ep_dtype_t dtype, size_t n0,
                                                 size_t n1) {
  deep_ep_tensor_t made = deep_ep_tensor_3d(data, dtype, n0, n1, 0);
  made.ndim = 2;
  return made;
}

static inline deep_ep_tensor_t deep_ep_tensor_1d(const void *data, deep_ep_dtype_t dtype, size_t n0) {
  deep_ep_tensor_t made = deep_ep_tensor_2d(data, dtype, n0, 0);
  made.ndim = 1;
  return made;
}

/* Short names, for deep_ep_all_to_all(input, output, size, FP8). */
#ifndef DEEP_EP_NO_SHORT_NAMES
#define FP8 DEEP_EP_FP8
#define BF16 DEEP_EP_BF16
#define FP32 DEEP_EP_FP32
#endif
