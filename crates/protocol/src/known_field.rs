//! Known header fields: an enum for those of requests and one for those of responses, so that fields are identified
//! without comparing names.
//!
//! Names are case-insensitive (RFC 9110 §5.1). Invariant: within each enum the hash function below has no collisions,
//! which is verified at compile time.

/// Defines an enum of header fields with their names, and the lookup by name.
macro_rules! known_fields {
    ($(#[$attribute:meta])* $type:ident: $($variant:ident $name:literal),+ $(,)?) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u8)]
        pub enum $type {
            $(#[doc = $name] $variant,)+
        }

        // A set of fields must fit in one word.
        const _: () = assert!($type::ALL.len() <= 64);

        impl $type {
            /// All known fields, in the order of their numbers.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The usual spelling of the name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }

            /// Returns the known field with that name, case-insensitive.
            pub fn from_name(name: &[u8]) -> Option<Self> {
                Self::from_token(name).filter(|_| name.iter().all(|byte| !byte.is_ascii_control()))
            }

            /// As `from_name`, for a name without control characters.
            pub(crate) fn from_token(name: &[u8]) -> Option<Self> {
                static SLOTS: [Option<$type>; 256] = {
                    let mut slots = [None; 256];
                    let mut index = 0;
                    while index < $type::ALL.len() {
                        let field = $type::ALL[index];
                        let name = field.name().as_bytes();
                        let slot = $crate::known_field::slot(name.len(), name[0], name[name.len() - 1]);
                        assert!(slots[slot].is_none(), "two names share a slot: choose other factors");
                        slots[slot] = Some(field);
                        index += 1;
                    }
                    slots
                };
                let (&first, &last) = (name.first()?, name.last()?);
                let candidate = SLOTS[$crate::known_field::slot(name.len(), first, last)]?;
                $crate::known_field::same_but_for_case(name, candidate.name().as_bytes()).then_some(candidate)
            }
        }
    };
}
pub(crate) use known_fields;

/// Compares names eight bytes at a time, ignoring the bit that distinguishes capitals from lower case. For the other
/// bytes of known names, that bit only distinguishes digits and "-" from control characters.
pub(crate) fn same_but_for_case(name: &[u8], known: &[u8]) -> bool {
    if name.len() != known.len() {
        return false;
    }
    let word = |bytes: &[u8; 8]| u64::from_le_bytes(*bytes) | 0x2020_2020_2020_2020;
    let half = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes) | 0x2020_2020;
    // The last word overlaps the previous one, so that no bytes are left over.
    if let (Some(name_end), Some(known_end)) = (name.last_chunk::<8>(), known.last_chunk::<8>()) {
        let (mut name, mut known) = (name, known);
        while let (Some((a, name_rest)), Some((b, known_rest))) =
            (name.split_first_chunk::<8>(), known.split_first_chunk::<8>())
        {
            if word(a) != word(b) {
                return false;
            }
            (name, known) = (name_rest, known_rest);
        }
        return word(name_end) == word(known_end);
    }
    if let (Some(name_start), Some(known_start)) = (name.first_chunk::<4>(), known.first_chunk::<4>())
        && let (Some(name_end), Some(known_end)) = (name.last_chunk::<4>(), known.last_chunk::<4>())
    {
        return half(name_start) == half(known_start) && half(name_end) == half(known_end);
    }
    name.iter().zip(known).all(|(a, b)| a | 0x20 == b | 0x20)
}

/// Hash of length, first and last byte, without collisions within an enum. The factors were found by trial.
pub(crate) const fn slot(length: usize, first: u8, last: u8) -> usize {
    (length + (first | 0x20) as usize * 3 + (last | 0x20) as usize * 104) & 0xff
}

#[cfg(test)]
mod tests {
    use super::same_but_for_case;

    #[test]
    fn a_difference_at_any_place_of_a_name_of_any_length_is_seen() {
        for length in 0..40 {
            let known = vec![b'k'; length];
            let name = vec![b'K'; length];
            assert!(same_but_for_case(&name, &known), "{length}");
            assert!(!same_but_for_case(&name, &[&known[..], b"k"].concat()), "{length}");
            for place in 0..length {
                let mut name = name.clone();
                name[place] = b'x';
                assert!(!same_but_for_case(&name, &known), "{place} of {length}");
            }
        }
    }
}
