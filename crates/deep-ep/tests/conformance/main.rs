//! Conformance: every engine gives what `deep_ep::reference` says, bit for bit where no
//! tolerance is documented, in whatever way ranks are started and calls are made.
//!
//! Nothing here knows an engine. `DEEP_EP_ENGINE` names the one to test.
//!
//! | module | subject |
//! | --- | --- |
//! | `launch` | runs a case on ranks that are threads or processes |
//! | `cases` | the list of cases |
//! | `world` | the inputs of all ranks, made from a few numbers |
//! | `high_throughput`, `low_latency` | the calls, with comparison of all that they return |
//! | `properties` | random inputs |
//! | `named` | cases with a name |

mod cases;
mod compare;
mod high_throughput;
mod launch;
mod low_latency;
mod named;
mod properties;
mod random;
mod world;
