/*
 * Ranks that are threads of one process: by deep_ep_communicator_local(), by a caller's own all_gather, and
 * by TCP. Also a wait that is interrupted, and one that ends with a deadline.
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>

#include "example.h"

enum { RANKS = 3, TOKENS = 4, HIDDEN = 8 };

/* An all_gather between threads, as a caller might have it. */
typedef struct shared {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  unsigned char *all;
  int came, left;
} shared;

typedef struct player {
  size_t rank;
  shared *group;
  deep_ep_communicator_t *communicator;
} player;

static int32_t gather(void *context, const void *mine, size_t bytes, void *all) {
  player *me = (player *)context;
  shared *group = me->group;
  pthread_mutex_lock(&group->mutex);
  while (group->left > 0) pthread_cond_wait(&group->changed, &group->mutex);
  if (group->came == 0) group->all = (unsigned char *)memory(RANKS, bytes);
  memcpy(group->all + me->rank * bytes, mine, bytes);
  if (++group->came == RANKS) {
    group->left = RANKS;
    pthread_cond_broadcast(&group->changed);
  }
  while (group->left == 0) pthread_cond_wait(&group->changed, &group->mutex);
  memcpy(all, group->all, bytes * RANKS);
  if (--group->left == 0) {
    group->came = 0;
    free(group->all);
    pthread_cond_broadcast(&group->changed);
  }
  pthread_mutex_unlock(&group->mutex);
  return 0;
}

static int32_t broken(void *context, const void *mine, size_t bytes, void *all) {
  (void)context, (void)mine, (void)bytes, (void)all;
  return 7;
}

/* Every token goes to all ranks and comes back RANKS times. */
static void round_trip(deep_ep_communicator_t *communicator) {
  deep_ep_buffer_t *buffer;
  CALL(deep_ep_buffer_create(communicator, NULL, &buffer));
  float x[TOKENS * HIDDEN], sums[TOKENS * HIDDEN];
  int32_t topk_idx[TOKENS * RANKS];
  for (int i = 0; i < TOKENS * HIDDEN; i++) x[i] = (float)i;
  for (int i = 0; i < TOKENS * RANKS; i++) topk_idx[i] = i % RANKS;
  deep_ep_dispatch_input_t in = deep_ep_dispatch_input();
  in.x = deep_ep_tensor_2d(x, DEEP_EP_FP32, TOKENS, HIDDEN);
  in.topk_idx = deep_ep_tensor_2d(topk_idx, DEEP_EP_INT32, TOKENS, RANKS);
  in.num_experts = RANKS;
  deep_ep_dispatched_t got = deep_ep_dispatched();
  CALL(deep_ep_dispatch(buffer, &in, NULL, &got));
  CHECK(got.counts.rows == TOKENS * RANKS);
  deep_ep_combine_input_t back = deep_ep_combine_input();
  back.x = got.x;
  back.handle = got.handle;
  deep_ep_combine_output_t out = deep_ep_combine_output();
  out.x = deep_ep_tensor_2d(sums, DEEP_EP_FP32, TOKENS, HIDDEN);
  CALL(deep_ep_combine(buffer, &back, &out));
  for (int i = 0; i < TOKENS * HIDDEN; i++) CHECK(sums[i] == RANKS * x[i]);
  CALL(deep_ep_dispatched_free(&got));
  CALL(deep_ep_buffer_barrier(buffer));
  CALL(deep_ep_buffer_free(buffer));
}

static void *play_local(void *argument) {
  round_trip(((player *)argument)->communicator);
  return NULL;
}

static void *play_gather(void *argument) {
  player *me = (player *)argument;
  deep_ep_communicator_t *communicator;
  CALL(deep_ep_communicator_from_all_gather(me->rank, RANKS, gather, me, &communicator));
  round_trip(communicator);
  CALL(deep_ep_communicator_free(communicator));
  return NULL;
}

static int32_t stop(void *context) {
  return ++*(int *)context > 2;
}

/* The last rank does not come. Rank 0 is interrupted, or all have a short deadline. */
static void *wait_in_vain(void *argument) {
  player *me = (player *)argument;
  const int interrupted = me->group != NULL;
  deep_ep_buffer_t *buffer;
  deep_ep_buffer_config_t config = deep_ep_buffer_config();
  config.timeout_seconds = interrupted ? 60 : 0.3;
  CALL(deep_ep_buffer_create(me->communicator, &config, &buffer));
  if (me->rank < RANKS - 1) {
    int asked = 0;
    if (interrupted && me->rank == 0) deep_ep_set_interrupt_check(stop, &asked);
    const deep_ep_status_t status = deep_ep_buffer_barrier(buffer);
    deep_ep_set_interrupt_check(NULL, NULL);
    deep_ep_error_t error = deep_ep_error();
    CALL(deep_ep_last_error_details(&error));
    CHECK(status == error.status);
    if (interrupted) {
      CHECK(status == DEEP_EP_EABORTED && error.rank == 0);
    } else {
      CHECK(status == DEEP_EP_ETIMEOUT || status == DEEP_EP_EABORTED);
      CHECK(error.num_ranks >= 1 && error.ranks[error.num_ranks - 1] == RANKS - 1);
      CHECK(strstr(error.message, error.operation) != NULL);
      if (status == DEEP_EP_ETIMEOUT) CHECK(error.waited_seconds >= 0.3);
    }
  }
  CALL(deep_ep_communicator_barrier(me->communicator));
  CALL(deep_ep_buffer_free(buffer));
  return NULL;
}

static void play(void *(*what)(void *), int with_group) {
  static shared group;
  pthread_t threads[RANKS];
  player players[RANKS];
  deep_ep_communicator_t *ends[RANKS];
  memset(&group, 0, sizeof group);
  CHECK(pthread_mutex_init(&group.mutex, NULL) == 0 && pthread_cond_init(&group.changed, NULL) == 0);
  CALL(deep_ep_communicator_local(RANKS, ends));
  for (size_t i = 0; i < RANKS; i++) {
    players[i].rank = i;
    players[i].group = with_group ? &group : NULL;
    players[i].communicator = ends[i];
    CHECK(pthread_create(&threads[i], NULL, what, &players[i]) == 0);
  }
  for (size_t i = 0; i < RANKS; i++) {
    CHECK(pthread_join(threads[i], NULL) == 0);
    CALL(deep_ep_communicator_free(ends[i]));
  }
}

int main(void) {
  play(play_local, 0);
  play(play_gather, 1);
  play(wait_in_vain, 1);
  play(wait_in_vain, 0);

  deep_ep_communicator_t *communicator;
  deep_ep_buffer_t *buffer;
  CALL(deep_ep_communicator_from_all_gather(0, 2, broken, NULL, &communicator));
  CHECK(deep_ep_buffer_create(communicator, NULL, &buffer) == DEEP_EP_EBOOTSTRAP);
  CHECK(strstr(deep_ep_last_error(), "returned 7") != NULL);
  CALL(deep_ep_communicator_free(communicator));
  CHECK(deep_ep_communicator_local(0, NULL) == DEEP_EP_EINVAL);

  deep_ep_tcp_config_t config = deep_ep_tcp_config();
  config.world_size = 1;
  CALL(deep_ep_communicator_tcp(&config, &communicator));
  CALL(deep_ep_communicator_set_timeout(communicator, 5));
  CHECK(deep_ep_communicator_set_timeout(communicator, -5) == DEEP_EP_EINVAL);
  CALL(deep_ep_communicator_free(communicator));
  config.world_size = 2;
  config.rank = 2;
  CHECK(deep_ep_communicator_tcp(&config, &communicator) == DEEP_EP_EINVAL);
  printf("threads agree\n");
  return 0;
}
