//! What to compile for.

use crate::{
    engine::cuda::driver::{
        device::ComputeCapability,
        nvrtc::{Image, Nvrtc},
    },
    error::{Error, Result},
};

/// The oldest architecture that the kernels are written for (Ampere).
const OLDEST: u32 = 80;

/// An architecture and the kind of image for it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Target {
    /// As the compiler's option spells it: `sm_90a`, or `compute_90` for PTX.
    pub(crate) architecture: String,
    ptx: bool,
}

impl Target {
    /// The device's own architecture if the compiler knows it, from Hopper on with the features that
    /// are its alone; else PTX of the newest that is older, which the driver compiles.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if the device is too old.
    pub(crate) fn of(device: ComputeCapability, known: &[u32]) -> Result<Self> {
        let own = device.major * 10 + device.minor;
        if known.contains(&own) && own >= OLDEST {
            return Ok(Self {
                architecture: format!("sm_{own}{}", if own >= 90 { "a" } else { "" }),
                ptx: false,
            });
        }
        let older = known.iter().filter(|&&a| (OLDEST..own).contains(&a)).max();
        let Some(older) = older else {
            return Err(Error::Unsupported {
                feature: "CUDA".into(),
                why: format!("the GPU has compute capability {device}; 8.0 or newer is needed"),
            });
        };
        Ok(Self {
            architecture: format!("compute_{older}"),
            ptx: true,
        })
    }

    /// The same of a loaded compiler.
    pub(crate) fn with(device: ComputeCapability, nvrtc: &Nvrtc) -> Result<Self> {
        Self::of(device, nvrtc.architectures())
    }

    pub(crate) fn image(&self) -> Image {
        match self.ptx {
            true => Image::Ptx,
            false => Image::Cubin,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(major: u32, minor: u32, known: &[u32]) -> Result<Target> {
        Target::of(ComputeCapability { major, minor }, known)
    }

    #[test]
    fn a_known_architecture_is_compiled_for_itself() {
        let known = [75, 80, 89, 90, 100];
        for (major, minor, name) in [(8, 0, "sm_80"), (8, 9, "sm_89"), (9, 0, "sm_90a")] {
            let target = target(major, minor, &known).unwrap();
            assert_eq!(target.architecture, name);
            assert_eq!(target.image(), Image::Cubin);
        }
    }

    #[test]
    fn a_newer_gpu_than_the_compiler_gets_ptx() {
        let target = target(12, 1, &[75, 80, 90]).unwrap();
        assert_eq!(target.architecture, "compute_90");
        assert_eq!(target.image(), Image::Ptx);
    }

    #[test]
    fn an_old_gpu_is_refused_by_its_capability() {
        let error = target(7, 5, &[75, 80]).unwrap_err().to_string();
        assert!(error.contains("7.5"), "{error}");
    }
}
