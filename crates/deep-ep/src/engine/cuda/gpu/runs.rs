//! The memory of a strided tensor as runs of neighbouring bytes.

use crate::dtype::DType;

/// Where the elements of a tensor are: runs of equal length at offsets from its first byte.
#[derive(Debug)]
pub(crate) struct Runs {
    /// Extent and stride in bytes of the dimensions outside a run, the smallest stride first.
    outer: Vec<(usize, usize)>,
    /// Bytes of a run; 0 if there are no elements.
    run: usize,
    /// Bytes from the first to one past the last element.
    span: usize,
}

impl Runs {
    /// Of a tensor whose span is known to be fewer than 2^63 bytes.
    pub(crate) fn new(dtype: DType, shape: &[usize], strides: &[usize]) -> Self {
        if shape.contains(&0) {
            return Self {
                outer: vec![],
                run: 0,
                span: 0,
            };
        }
        let mut outer: Vec<_> = shape
            .iter()
            .zip(strides)
            .filter(|&(&n, _)| n > 1)
            .map(|(&n, &stride)| (n, stride * dtype.size()))
            .collect();
        outer.sort_by_key(|&(_, stride)| stride);
        let last: usize = outer.iter().map(|&(n, stride)| (n - 1) * stride).sum();
        let mut run = dtype.size();
        while let Some(&(n, stride)) = outer.first()
            && stride == run
        {
            run *= n;
            outer.remove(0);
        }
        Self {
            outer,
            run,
            span: last + dtype.size(),
        }
    }

    /// Bytes from the first to one past the last element.
    pub(crate) fn span(&self) -> usize {
        self.span
    }

    /// Bytes of a run.
    pub(crate) fn run(&self) -> usize {
        self.run
    }

    /// Whether nothing lies between the elements.
    pub(crate) fn is_one(&self) -> bool {
        self.outer.is_empty()
    }

    /// The offset of each run, in bytes.
    pub(crate) fn offsets(&self) -> impl Iterator<Item = usize> + '_ {
        let runs = match self.run {
            0 => 0,
            _ => self.outer.iter().map(|&(n, _)| n).product::<usize>(),
        };
        (0..runs).map(|mut index| {
            let mut offset = 0;
            for &(n, stride) in &self.outer {
                offset += index % n * stride;
                index /= n;
            }
            offset
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_as_long_as_they_can_be() {
        let cases: [(&[usize], &[usize]); 6] = [
            (&[3, 4], &[4, 1]),
            (&[3, 4], &[6, 1]),
            (&[3, 4], &[1, 3]),
            (&[2, 3, 2], &[8, 1, 4]),
            (&[3, 2], &[1, 1]),
            (&[2, 0], &[0, 1]),
        ];
        let runs = |i: usize| Runs::new(DType::U8, cases[i].0, cases[i].1);
        assert_eq!(
            (runs(0).run(), runs(0).span(), runs(0).is_one()),
            (12, 12, true)
        );
        assert_eq!((runs(1).run(), runs(1).span()), (4, 16));
        assert_eq!(runs(1).offsets().collect::<Vec<_>>(), [0, 6, 12]);
        assert_eq!((runs(2).run(), runs(2).is_one()), (12, true));
        assert_eq!((runs(3).run(), runs(3).span()), (3, 15));
        assert_eq!(runs(3).offsets().collect::<Vec<_>>(), [0, 4, 8, 12]);
        // Rows that share memory.
        assert_eq!((runs(4).run(), runs(4).span()), (3, 4));
        assert_eq!(runs(4).offsets().collect::<Vec<_>>(), [0, 1]);
        assert_eq!((runs(5).span(), runs(5).offsets().count()), (0, 0));
    }

    #[test]
    fn every_element_is_in_a_run() {
        let shapes: [[usize; 3]; 3] = [[3, 4, 5], [1, 6, 2], [2, 2, 2]];
        let strides: [[usize; 3]; 4] = [[20, 5, 1], [40, 1, 6], [1, 0, 3], [100, 7, 2]];
        for shape in shapes {
            for strides in strides {
                let mut wanted = std::collections::BTreeSet::new();
                for i in 0..shape[0] {
                    for j in 0..shape[1] {
                        for k in 0..shape[2] {
                            let at = i * strides[0] + j * strides[1] + k * strides[2];
                            wanted.extend(at * 2..at * 2 + 2);
                        }
                    }
                }
                let runs = Runs::new(DType::Bf16, &shape, &strides);
                let found: std::collections::BTreeSet<_> =
                    runs.offsets().flat_map(|at| at..at + runs.run()).collect();
                assert_eq!(found, wanted, "{shape:?} {strides:?}");
                assert_eq!(wanted.last().unwrap() + 1, runs.span());
            }
        }
    }
}
