//! Tensors of C, and memory that it holds.

use std::sync::Arc;

use deep_ep_c::{
    loan::{LoanObject, deep_ep_loan_free, deep_ep_loan_tensor, deep_ep_loan_write},
    tensor::TensorView,
};
use library::{DType, Device, Element, Result, Shape, Tensor, TensorMut};

use super::{Owned, c};

/// No tensor.
pub(crate) fn none() -> TensorView {
    // SAFETY: all zeros are no tensor.
    unsafe { std::mem::zeroed() }
}

/// A tensor as C passes it.
pub(crate) fn view(tensor: &Tensor<'_>) -> TensorView {
    let n = tensor.shape().len();
    let mut view = none();
    view.data = tensor.as_ptr().cast_mut().cast();
    view.dtype = tensor.dtype() as i32;
    view.device = match tensor.device() {
        Device::Host => 0,
        Device::Cuda(ordinal) => ordinal as i32 + 1,
    };
    view.ndim = n;
    view.shape[..n].copy_from_slice(tensor.shape());
    view.strides[..n].copy_from_slice(tensor.strides());
    view
}

pub(crate) fn view_optional(tensor: &Option<Tensor<'_>>) -> TensorView {
    tensor.as_ref().map_or(none(), view)
}

/// An output as C passes it.
pub(crate) fn view_mut(tensor: &mut TensorMut<'_>) -> TensorView {
    let mut view = view(&tensor.as_tensor());
    view.data = tensor.as_mut_ptr().cast();
    view
}

pub(crate) fn view_mut_optional(tensor: &mut Option<TensorMut<'_>>) -> TensorView {
    tensor.as_mut().map_or(none(), view_mut)
}

fn dtype(code: i32) -> DType {
    let all = [
        DType::Bf16,
        DType::F16,
        DType::F32,
        DType::F8E4M3,
        DType::U8,
        DType::I8,
        DType::I32,
        DType::I64,
    ];
    let found = all.into_iter().find(|dtype| *dtype as i32 == code);
    found.expect("an element type")
}

/// A tensor that C gave, which lives while `_keep` is borrowed.
pub(crate) fn tensor<'a, K: ?Sized>(view: &TensorView, _keep: &'a K) -> Tensor<'a> {
    let (dims, strides) = (&view.shape[..view.ndim], &view.strides[..view.ndim]);
    let shape = Shape::strided(dtype(view.dtype), dims, strides).expect("C's shape");
    assert_eq!(view.device, 0, "on the host");
    // SAFETY: C says that it lives as long as what is borrowed.
    unsafe { Tensor::from_raw(view.data.cast(), shape, Device::Host) }
}

/// What C's memory belongs to.
type Keep = Arc<dyn std::any::Any + Send + Sync>;

/// A tensor in memory of the test, or of C.
#[expect(dead_code, reason = "what keeps the memory is held, not used")]
pub(crate) enum OwnedTensor {
    Test(library::OwnedTensor),
    C(View, Keep),
}

/// A view that other threads may have, too.
pub(crate) struct View(TensorView);

// SAFETY: it is plain memory that nobody writes.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl OwnedTensor {
    pub(crate) fn of(view: TensorView, keep: &Keep) -> Self {
        Self::C(View(view), keep.clone())
    }

    pub(crate) fn of_optional(view: TensorView, keep: &Keep) -> Option<Self> {
        (view.dtype != 0).then(|| Self::of(view, keep))
    }

    pub(crate) fn zeros(dtype: DType, shape: &[usize]) -> Result<Self> {
        library::OwnedTensor::zeros(dtype, shape).map(Self::Test)
    }

    pub(crate) fn as_tensor(&self) -> Tensor<'_> {
        match self {
            Self::Test(tensor) => tensor.as_tensor(),
            Self::C(view, _) => tensor(&view.0, self),
        }
    }

    pub(crate) fn as_tensor_mut(&mut self) -> TensorMut<'_> {
        match self {
            Self::Test(tensor) => tensor.as_tensor_mut(),
            Self::C(..) => panic!("the suite writes no tensor of the library"),
        }
    }

    pub(crate) fn as_slice<T: Element>(&self) -> Result<&[T]> {
        self.as_tensor().as_slice()
    }

    pub(crate) fn shape(&self) -> &[usize] {
        match self {
            Self::Test(tensor) => tensor.shape(),
            Self::C(view, _) => &view.0.shape[..view.0.ndim],
        }
    }

    pub(crate) fn strides(&self) -> &[usize] {
        match self {
            Self::Test(tensor) => tensor.strides(),
            Self::C(view, _) => &view.0.strides[..view.0.ndim],
        }
    }

    pub(crate) fn dtype(&self) -> DType {
        self.as_tensor().dtype()
    }
}

/// Memory of the library.
pub(crate) struct Loan {
    object: Arc<Owned<LoanObject>>,
    view: View,
    rank: usize,
}

impl Loan {
    pub(crate) fn new(pointer: *mut LoanObject, rank: usize) -> Self {
        let object = Arc::new(Owned::new(pointer, deep_ep_loan_free));
        let mut view = none();
        c!(rank, deep_ep_loan_tensor(pointer, &mut view)).expect("rows");
        let view = View(view);
        Self { object, view, rank }
    }

    pub(crate) fn pointer(&self) -> *const LoanObject {
        self.object.pointer
    }

    /// What keeps other tensors of the same memory.
    pub(crate) fn keep(&self) -> Keep {
        self.object.clone()
    }

    pub(crate) fn as_tensor(&self) -> Tensor<'_> {
        tensor(&self.view.0, self)
    }

    pub(crate) fn dtype(&self) -> DType {
        self.as_tensor().dtype()
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.view.0.shape[..self.view.0.ndim]
    }

    pub(crate) fn as_slice<T: Element>(&self) -> Result<&[T]> {
        self.as_tensor().as_slice()
    }

    pub(crate) fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        let len = self.as_slice::<T>()?.len();
        let mut data = std::ptr::null_mut();
        c!(self.rank, deep_ep_loan_write(self.pointer(), &mut data))?;
        assert_eq!(data, self.view.0.data);
        if len == 0 {
            return Ok(&mut []);
        }
        // SAFETY: so many values are there, and C says that nobody reads them now.
        Ok(unsafe { std::slice::from_raw_parts_mut(data.cast(), len) })
    }
}

impl std::fmt::Debug for Loan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "loan of {:?}", self.as_tensor())
    }
}

impl std::fmt::Debug for OwnedTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.as_tensor().fmt(f)
    }
}
