//! Input files: safetensors with `x`, `topk_idx`, `topk_weights` and the metadata `num_experts`.
//!
//! Format: <https://github.com/huggingface/safetensors#format>.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use crate::batch::{Batch, Ids, Sizes};

/// The trace that ships with the program; `data/README.md` says where it comes from.
static TRACE: &[u8] = include_bytes!("../data/trace.safetensors");

/// The shipped trace.
pub(crate) fn trace(experts: Option<usize>) -> Result<Batch> {
    parse(TRACE, experts).context("the shipped trace")
}

/// Reads a file. `experts` stands in for, or overrides, the metadata's `num_experts`.
pub(crate) fn read(path: &Path, experts: Option<usize>) -> Result<Batch> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    parse(&bytes, experts).with_context(|| format!("{}", path.display()))
}

fn parse(bytes: &[u8], experts: Option<usize>) -> Result<Batch> {
    let (_, metadata) = SafeTensors::read_metadata(bytes).context("not a safetensors file")?;
    let tensors = SafeTensors::deserialize(bytes).context("not a safetensors file")?;
    let experts = match experts {
        Some(experts) => experts,
        None => metadata_experts(metadata.metadata().as_ref())?,
    };

    let x = matrix(
        &tensors,
        "x",
        "[T, H]",
        &[Dtype::BF16, Dtype::F32, Dtype::F16],
    )?;
    let idx = matrix(&tensors, "topk_idx", "[T, K]", &[Dtype::I64, Dtype::I32])?;
    let weights = matrix(&tensors, "topk_weights", "[T, K]", &[Dtype::F32])?;
    let (tokens, hidden, top_k) = (x.shape()[0], x.shape()[1], idx.shape()[1]);
    ensure!(
        idx.shape()[0] == tokens,
        "topk_idx has {} tokens, but x has {tokens}",
        idx.shape()[0]
    );
    ensure!(
        weights.shape() == idx.shape(),
        "topk_weights is {:?}, but topk_idx is {:?}: they must have the same shape",
        weights.shape(),
        idx.shape()
    );
    ensure!(hidden > 0, "x has hidden size 0, but it must be at least 8");

    let batch = Batch {
        sizes: Sizes {
            tokens,
            hidden,
            top_k,
            experts,
        },
        x: rows(&x),
        topk_idx: ids(&idx),
        topk_weights: elements(weights.data(), f32::from_le_bytes),
    };
    check_ids(&batch)?;
    Ok(batch)
}

fn metadata_experts(metadata: Option<&std::collections::HashMap<String, String>>) -> Result<usize> {
    let text = metadata.and_then(|m| m.get("num_experts")).ok_or_else(|| {
        anyhow!("the metadata has no num_experts; say how many experts there are with --experts")
    })?;
    text.trim().parse().ok().filter(|&n| n > 0).ok_or_else(|| {
        anyhow!("num_experts in the metadata is {text:?}, but it must be a positive integer; --experts overrides it")
    })
}

/// The two-dimensional tensor `name` of one of the types `allowed`.
fn matrix<'a>(
    tensors: &SafeTensors<'a>,
    name: &str,
    shape: &str,
    allowed: &[Dtype],
) -> Result<TensorView<'a>> {
    let tensor = tensors.tensor(name).map_err(|_| {
        let mut names = tensors.names();
        names.sort_unstable();
        anyhow!(
            "there is no tensor {name} {shape}; the file has: {}",
            names.join(", ")
        )
    })?;
    let types = allowed
        .iter()
        .map(|t| format!("{t:?}"))
        .collect::<Vec<_>>()
        .join(" or ");
    ensure!(
        allowed.contains(&tensor.dtype()),
        "{name} is {:?}, but it must be {types}",
        tensor.dtype()
    );
    ensure!(
        tensor.shape().len() == 2,
        "{name} has shape {:?}, but it must be {shape}",
        tensor.shape()
    );
    Ok(tensor)
}

/// Little-endian elements, wherever they are aligned.
fn elements<const N: usize, T>(bytes: &[u8], convert: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes
        .as_chunks::<N>()
        .0
        .iter()
        .map(|chunk| convert(*chunk))
        .collect()
}

fn rows(x: &TensorView<'_>) -> Vec<bf16> {
    match x.dtype() {
        Dtype::F32 => elements(x.data(), |b| bf16::from_f32(f32::from_le_bytes(b))),
        Dtype::F16 => elements(x.data(), |b| bf16::from_f32(f16::from_le_bytes(b).to_f32())),
        _ => elements(x.data(), bf16::from_le_bytes),
    }
}

fn ids(idx: &TensorView<'_>) -> Ids {
    match idx.dtype() {
        Dtype::I32 => Ids::I32(elements(idx.data(), i32::from_le_bytes)),
        _ => Ids::I64(elements(idx.data(), i64::from_le_bytes)),
    }
}

/// The engine checks ids as well; here the token can be named before ranks are started.
fn check_ids(batch: &Batch) -> Result<()> {
    let Sizes { top_k, experts, .. } = batch.sizes;
    for at in 0..batch.topk_idx.len() {
        let id = batch.topk_idx.get(at);
        if id >= 0 && id as u64 >= experts as u64 {
            bail!(
                "topk_idx[{}, {}] is {id}, but it must be below num_experts = {experts} (negative: no choice)",
                at / top_k,
                at % top_k
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    type Spec<'a> = (&'a str, Dtype, Vec<usize>, Vec<u8>);

    fn file(tensors: &[Spec<'_>], experts: Option<&str>) -> Vec<u8> {
        let views = tensors.iter().map(|(name, dtype, shape, data)| {
            (*name, TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        let metadata = experts.map(|e| [("num_experts".to_owned(), e.to_owned())].into());
        safetensors::serialize(views, metadata).unwrap()
    }

    fn bytes<const N: usize>(values: &[[u8; N]]) -> Vec<u8> {
        values.concat()
    }

    fn good() -> Vec<Spec<'static>> {
        vec![
            (
                "x",
                Dtype::F32,
                vec![2, 2],
                bytes(&[1f32, 2., -3., 0.5].map(f32::to_le_bytes)),
            ),
            (
                "topk_idx",
                Dtype::I32,
                vec![2, 1],
                bytes(&[3i32, -1].map(i32::to_le_bytes)),
            ),
            (
                "topk_weights",
                Dtype::F32,
                vec![2, 1],
                bytes(&[1f32, 0.].map(f32::to_le_bytes)),
            ),
        ]
    }

    fn error(tensors: &[Spec<'_>], experts: Option<&str>) -> String {
        format!("{:#}", parse(&file(tensors, experts), None).unwrap_err())
    }

    #[test]
    fn float_rows_become_bf16_and_ids_keep_their_width() {
        let batch = parse(&file(&good(), Some("4")), None).unwrap();
        assert_eq!(
            batch.sizes,
            Sizes {
                tokens: 2,
                hidden: 2,
                top_k: 1,
                experts: 4
            }
        );
        assert_eq!(batch.x, [1f32, 2., -3., 0.5].map(bf16::from_f32));
        assert_eq!(batch.topk_idx, Ids::I32(vec![3, -1]));
        assert_eq!(
            parse(&file(&good(), None), Some(8)).unwrap().sizes.experts,
            8
        );
    }

    #[test]
    fn what_is_wrong_with_a_file_is_named() {
        assert!(
            error(&good()[..2], Some("4"))
                .contains("no tensor topk_weights [T, K]; the file has: topk_idx, x")
        );
        assert!(error(&good(), None).contains("--experts"));
        assert!(error(&good(), Some("many")).contains("\"many\""));
        let text = error(&good(), Some("3"));
        assert!(
            text.contains("topk_idx[0, 0] is 3, but it must be below num_experts = 3"),
            "{text}"
        );
        let mut wrong = good();
        wrong[2].1 = Dtype::I32;
        assert!(error(&wrong, Some("4")).contains("topk_weights is I32, but it must be F32"));
        wrong = good();
        wrong[2].2 = vec![1, 2];
        assert!(error(&wrong, Some("4")).contains("same shape"));
        assert!(
            format!("{:#}", parse(b"hello, not a tensor", None).unwrap_err())
                .contains("not a safetensors file")
        );
    }

    #[test]
    fn the_shipped_trace_is_usable() {
        let batch = trace(None).unwrap();
        assert_eq!(
            batch.sizes,
            Sizes {
                tokens: 1024,
                hidden: 384,
                top_k: 8,
                experts: 64
            }
        );
        assert!(batch.topk_weights.iter().all(|w| w.is_finite()));
    }
}
