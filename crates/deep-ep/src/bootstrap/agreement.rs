//! Comparing the settings of all ranks.
//!
//! Each rank sends its `(name, value)` pairs as text, so that a difference can be shown as the
//! user wrote it. Wire format: for each pair a `u32` length and the name, a `u32` length and the
//! value; little-endian. Whatever a peer sends only ever ends up in a message.

use crate::{
    error::{Error, Result},
    topology::Rank,
};

/// What stands in a message for a setting that a rank did not send.
const ABSENT: &str = "(not sent)";

pub(super) type Pairs = Vec<(String, String)>;

/// The pairs that every comparison includes, then `settings`.
pub(super) fn with_implicit(settings: &[(&'static str, String)]) -> Pairs {
    let order = if cfg!(target_endian = "little") {
        "little-endian"
    } else {
        "big-endian"
    };
    let implicit = [
        ("deep-ep version", env!("CARGO_PKG_VERSION").to_owned()),
        ("byte order", order.to_owned()),
    ];
    implicit
        .iter()
        .chain(settings)
        .map(|(name, value)| ((*name).to_owned(), value.clone()))
        .collect()
}

pub(super) fn encode(pairs: &Pairs) -> Vec<u8> {
    let mut bytes = Vec::new();
    for text in pairs.iter().flat_map(|(name, value)| [name, value]) {
        // A text beyond 4 GiB would not pass the limit of a contribution either.
        bytes.extend((text.len() as u32).to_le_bytes());
        bytes.extend(text.as_bytes());
    }
    bytes
}

/// `None` if the bytes are not what [`encode`] makes.
pub(super) fn decode(mut bytes: &[u8]) -> Option<Pairs> {
    fn text(bytes: &mut &[u8]) -> Option<String> {
        let (length, rest) = bytes.split_first_chunk::<4>()?;
        let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
        let (text, rest) = rest.split_at_checked(length)?;
        *bytes = rest;
        String::from_utf8(text.to_vec()).ok()
    }
    let mut pairs = Vec::new();
    while !bytes.is_empty() {
        pairs.push((text(&mut bytes)?, text(&mut bytes)?));
    }
    Some(pairs)
}

/// Checks that all ranks sent the same, and names the first setting that differs otherwise: this
/// rank's value and the first rank with another.
pub(super) fn compare(this_rank: Rank, all: &[Pairs]) -> Result<()> {
    let Some(mine) = all.get(this_rank.0) else {
        return Ok(());
    };
    let theirs = all
        .iter()
        .flatten()
        .filter(|(name, _)| value(mine, name).is_none());
    for (name, _) in mine.iter().chain(theirs) {
        let this_value = value(mine, name).unwrap_or(ABSENT);
        for (other, pairs) in all.iter().enumerate() {
            let other_value = value(pairs, name).unwrap_or(ABSENT);
            if other_value != this_value {
                return Err(Error::SettingsDiffer {
                    setting: name.clone().into(),
                    this_rank,
                    this_value: this_value.to_owned(),
                    other_rank: Rank(other),
                    other_value: other_value.to_owned(),
                });
            }
        }
    }
    Ok(())
}

fn value<'a>(pairs: &'a Pairs, name: &str) -> Option<&'a str> {
    let found = pairs.iter().find(|(key, _)| key == name)?;
    Some(&found.1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pairs(list: &[(&str, &str)]) -> Pairs {
        list.iter()
            .map(|(n, v)| (n.to_string(), v.to_string()))
            .collect()
    }

    #[test]
    fn a_setting_only_some_ranks_know_is_a_difference_for_all() {
        let all = [pairs(&[("H", "8")]), pairs(&[("H", "8"), ("K", "2")])];
        for rank in [0, 1] {
            let error = compare(Rank(rank), &all).unwrap_err().to_string();
            assert!(
                error.contains("K differs") && error.contains(ABSENT),
                "{error}"
            );
        }
        assert!(compare(Rank(0), &all[..1]).is_ok());
    }

    proptest! {
        #[test]
        fn decoding_inverts_encoding(pairs: Pairs) {
            prop_assert_eq!(decode(&encode(&pairs)), Some(pairs));
        }

        #[test]
        fn decoding_survives_any_bytes(bytes: Vec<u8>) {
            let _ = decode(&bytes);
        }
    }
}
