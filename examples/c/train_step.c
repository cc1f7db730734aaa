/*
 * A layer of experts that learns: forward, backward and update, three times.
 *
 *   deep-ep launch -n 4 ./train_step
 *
 * Expert e scales each channel: f_e(x) = a_e * x. A token's output is the sum of its choices' outputs by
 * their weights. Forward is a dispatch and a combine; backward is a dispatch along the same handle and a
 * combine. Everything is compared with the same layer computed on this rank alone, and the loss
 * falls.
 */
#include "example.h"

enum { TOKENS = 96, HIDDEN = 128, TOP_K = 3, LOCAL_EXPERTS = 2, STEPS = 3 };

/* This rank's part of the layer. */
typedef struct layer {
  size_t rank, ranks, experts;
  deep_ep_communicator_t *communicator;
  deep_ep_buffer_t *buffer;
  float a[LOCAL_EXPERTS * HIDDEN]; /* this rank's experts */
  float *all;                      /* all experts, for the comparison: [E, H] */
} layer;

/* This rank's batch. */
typedef struct batch {
  float x[TOKENS * HIDDEN], target[TOKENS * HIDDEN];
  int64_t topk_idx[TOKENS * TOP_K];
  float topk_weights[TOKENS * TOP_K];
} batch;

static void make_batch(batch *it, const layer *layer) {
  uint64_t state = 1000 + layer->rank;
  for (size_t i = 0; i < TOKENS * HIDDEN; i++) {
    it->x[i] = random_float(&state);
    it->target[i] = random_float(&state);
  }
  for (size_t t = 0; t < TOKENS; t++) {
    random_choices(&state, it->topk_idx + t * TOP_K, TOP_K, layer->experts);
    for (size_t k = 0; k < TOP_K; k++) {
      it->topk_weights[t * TOP_K + k] = 0.5f + 0.5f * random_float(&state);
    }
  }
}

/* Forward: `y` [T, H]. The caller frees what was received, which backward needs. */
static deep_ep_dispatched_t forward(layer *layer, const batch *in, float *y) {
  deep_ep_dispatch_input_t rows = deep_ep_dispatch_input();
  rows.x = deep_ep_tensor_2d(in->x, DEEP_EP_FP32, TOKENS, HIDDEN);
  rows.topk_idx = deep_ep_tensor_2d(in->topk_idx, DEEP_EP_INT64, TOKENS, TOP_K);
  rows.topk_weights = deep_ep_tensor_2d(in->topk_weights, DEEP_EP_FP32, TOKENS, TOP_K);
  rows.num_experts = layer->experts;
  deep_ep_dispatched_t got = deep_ep_dispatched();
  CALL(deep_ep_dispatch(layer->buffer, &rows, NULL, &got));

  size_t n = got.counts.output_rows, shape[2] = {n, HIDDEN};
  const float *x = (const float *)got.x.data, *weights = (const float *)got.topk_weights.data;
  const int64_t *idx = (const int64_t *)got.topk_idx.data;
  /* The outputs are written where their owners read them. */
  deep_ep_loan_t *loan;
  void *data;
  CALL(deep_ep_loan(layer->buffer, DEEP_EP_FP32, shape, 2, &loan));
  CALL(deep_ep_loan_write(loan, &data));
  float *out = (float *)data;
  memset(out, 0, n * HIDDEN * sizeof *out);
  for (size_t i = 0; i < n * TOP_K; i++) {
    if (idx[i] < 0) continue; /* that expert is elsewhere */
    size_t row = i / TOP_K;
    for (size_t h = 0; h < HIDDEN; h++) {
      out[row * HIDDEN + h] += weights[i] * layer->a[(size_t)idx[i] * HIDDEN + h] * x[row * HIDDEN + h];
    }
  }
  deep_ep_combine_input_t back = deep_ep_combine_input();
  back.loan = loan;
  back.handle = got.handle;
  deep_ep_combine_output_t sums = deep_ep_combine_output();
  sums.x = deep_ep_tensor_2d(y, DEEP_EP_FP32, TOKENS, HIDDEN);
  CALL(deep_ep_combine(layer->buffer, &back, &sums));
  CALL(deep_ep_loan_free(loan));
  return got;
}

/* Backward: from `dy` [T, H] the gradients `dx` [T, H], `dweights` [T, K] and, of this rank's experts, `da`. */
static void backward(layer *layer, const deep_ep_dispatched_t *got, const float *dy, float *dx,
                     float *dweights, float *da) {
  deep_ep_dispatch_input_t rows = deep_ep_dispatch_input();
  rows.x = deep_ep_tensor_2d(dy, DEEP_EP_FP32, TOKENS, HIDDEN);
  rows.handle = got->handle; /* the same routes: nothing is counted */
  deep_ep_dispatched_t grads = deep_ep_dispatched();
  CALL(deep_ep_dispatch(layer->buffer, &rows, NULL, &grads));

  size_t n = got->counts.output_rows;
  const float *x = (const float *)got->x.data, *dout = (const float *)grads.x.data;
  const float *weights = (const float *)got->topk_weights.data;
  const int64_t *idx = (const int64_t *)got->topk_idx.data;
  float *din = (float *)memory(n * HIDDEN, sizeof *din);
  float *dw = (float *)memory(n * TOP_K, sizeof *dw);
  memset(da, 0, LOCAL_EXPERTS * HIDDEN * sizeof *da);
  for (size_t i = 0; i < n * TOP_K; i++) {
    if (idx[i] < 0) continue;
    const size_t e = (size_t)idx[i], at = i / TOP_K * HIDDEN;
    for (size_t h = 0; h < HIDDEN; h++) {
      const float a = layer->a[e * HIDDEN + h], d = dout[at + h];
      din[at + h] += weights[i] * a * d;
      da[e * HIDDEN + h] += weights[i] * x[at + h] * d;
      dw[i] += a * x[at + h] * d;
    }
  }
  deep_ep_combine_input_t back = deep_ep_combine_input();
  back.x = deep_ep_tensor_2d(din, DEEP_EP_FP32, n, HIDDEN);
  back.topk_weights = deep_ep_tensor_2d(dw, DEEP_EP_FP32, n, TOP_K);
  back.handle = got->handle;
  deep_ep_combine_output_t sums = deep_ep_combine_output();
  sums.x = deep_ep_tensor_2d(dx, DEEP_EP_FP32, TOKENS, HIDDEN);
  sums.topk_weights = deep_ep_tensor_2d(dweights, DEEP_EP_FP32, TOKENS, TOP_K);
  CALL(deep_ep_combine(layer->buffer, &back, &sums));
  CALL(deep_ep_dispatched_free(&grads));
  free(din);
  free(dw);
}

static int close_to(float found, float expected) {
  return fabsf(found - expected) <= 1e-4f * (1 + fabsf(expected));
}

/* Compares with the layer computed by this rank alone. */
static void compare(const layer *layer, const batch *in, const float *y, const float *dy, const float *dx,
                    const float *dweights) {
  for (size_t t = 0; t < TOKENS; t++) {
    float dot[TOP_K] = {0};
    for (size_t h = 0; h < HIDDEN; h++) {
      float value = 0, grad = 0;
      for (size_t k = 0; k < TOP_K; k++) {
        float w = in->topk_weights[t * TOP_K + k];
        float a = layer->all[(size_t)in->topk_idx[t * TOP_K + k] * HIDDEN + h];
        value += w * a * in->x[t * HIDDEN + h];
        grad += w * a * dy[t * HIDDEN + h];
        dot[k] += a * in->x[t * HIDDEN + h] * dy[t * HIDDEN + h];
      }
      CHECK(close_to(y[t * HIDDEN + h], value));
      CHECK(close_to(dx[t * HIDDEN + h], grad));
    }
    for (size_t k = 0; k < TOP_K; k++) CHECK(close_to(dweights[t * TOP_K + k], dot[k]));
  }
}

/* One step; the loss over all ranks. */
static double step(layer *layer, const batch *in) {
  const size_t size = TOKENS * HIDDEN;
  float *y = (float *)memory(size, sizeof *y), *dy = (float *)memory(size, sizeof *dy);
  float *dx = (float *)memory(size, sizeof *dx);
  float dweights[TOKENS * TOP_K], da[LOCAL_EXPERTS * HIDDEN];
  CALL(deep_ep_communicator_all_gather(layer->communicator, layer->a, sizeof layer->a, layer->all));
  deep_ep_dispatched_t got = forward(layer, in, y);
  double loss = 0;
  for (size_t i = 0; i < size; i++) {
    dy[i] = y[i] - in->target[i];
    loss += 0.5 * dy[i] * dy[i];
  }
  backward(layer, &got, dy, dx, dweights, da);
  compare(layer, in, y, dy, dx, dweights);
  for (size_t i = 0; i < LOCAL_EXPERTS * HIDDEN; i++) layer->a[i] -= 0.005f * da[i];
  CALL(deep_ep_dispatched_free(&got));
  free(y);
  free(dy);
  free(dx);
  double *losses = (double *)memory(layer->ranks, sizeof *losses), sum = 0;
  CALL(deep_ep_communicator_all_gather(layer->communicator, &loss, sizeof loss, losses));
  for (size_t r = 0; r < layer->ranks; r++) sum += losses[r];
  free(losses);
  return sum;
}

int main(void) {
  layer layer;
  CALL(deep_ep_communicator_from_env(&layer.communicator));
  CALL(deep_ep_communicator_rank(layer.communicator, &layer.rank));
  CALL(deep_ep_communicator_size(layer.communicator, &layer.ranks));
  CALL(deep_ep_buffer_create(layer.communicator, NULL, &layer.buffer));
  layer.experts = LOCAL_EXPERTS * layer.ranks;
  if (layer.experts < TOP_K) {
    fprintf(stderr, "%d experts are too few: deep-ep launch -n 4 ./train_step\n", (int)layer.experts);
    return 1;
  }
  layer.all = (float *)memory(layer.experts * HIDDEN, sizeof *layer.all);
  uint64_t state = 77 + layer.rank;
  for (size_t i = 0; i < LOCAL_EXPERTS * HIDDEN; i++) layer.a[i] = random_float(&state);
  batch *in = (batch *)memory(1, sizeof *in);
  make_batch(in, &layer);
  double before = 1e30;
  for (int i = 0; i < STEPS; i++) {
    double loss = step(&layer, in);
    CHECK(loss < before);
    before = loss;
    if (layer.rank == 0) printf("step %d: loss %.3f\n", i, loss);
  }
  free(in);
  free(layer.all);
  CALL(deep_ep_buffer_free(layer.buffer));
  CALL(deep_ep_communicator_free(layer.communicator));
  if (layer.rank == 0) printf("outputs and gradients agree on %d ranks\n", (int)layer.ranks);
  return 0;
}
