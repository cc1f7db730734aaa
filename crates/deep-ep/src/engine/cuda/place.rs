//! Where memory that someone else made lies.

use std::ffi::{c_int, c_uint};

use super::driver::{
    checked::{Driver, call},
    sys::{CUmemorytype, CUpointer_attribute as Attribute, code},
};
use crate::{
    error::{Error, Result},
    tensor::Device,
};

/// Where `address` lies, as the driver knows it: on a GPU of this process, or on the host, where memory that
/// CUDA has not seen and pinned memory are. Without a driver everything is on the host.
///
/// # Errors
/// [`Error::Cuda`].
pub fn place_of(address: usize) -> Result<Device> {
    let Ok(driver) = Driver::get() else {
        return Ok(Device::Host);
    };
    let asked = |attribute, value: *mut c_int| {
        // SAFETY: the attributes that are asked for are 32-bit numbers, and the address is not
        // dereferenced.
        unsafe {
            call!(
                driver,
                cuPointerGetAttribute(value.cast(), attribute, address as u64)
            )
        }
    };
    let mut kind: c_int = 0;
    match asked(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, &mut kind) {
        Ok(()) if kind as c_uint != CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint => {
            return Ok(Device::Host);
        }
        Ok(()) => {}
        Err(Error::Cuda { code, .. }) if code == code::INVALID_VALUE => return Ok(Device::Host),
        Err(error) => return Err(error),
    }
    let mut ordinal: c_int = 0;
    asked(Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, &mut ordinal)?;
    Ok(Device::Cuda(ordinal.max(0) as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_memory_is_on_the_host() {
        let memory = [0u8; 16];
        assert_eq!(place_of(memory.as_ptr().addr()).unwrap(), Device::Host);
    }
}
