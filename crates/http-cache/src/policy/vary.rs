//! `Vary`: the request fields that a response depends on. (RFC 9111 §4.1)
//!
//! The names are in lower case, sorted and without duplicates, so that equivalent lists are equal. Values are compared
//! without the white space around their commas. Normalising the fields further is up to the site, except for
//! `Accept-Language`: a location may ignore its case, order and repetitions.

/// Maximum length of all names together; a response with a longer list is not stored.
pub const NAMES_MAX: usize = 512;

/// Maximum number of names.
const COUNT_MAX: usize = 16;

/// The parsed `Vary` of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Vary {
    /// The response depends on no field.
    Nothing,
    /// The response depends on these fields: names in lower case, separated by commas.
    Fields(Box<[u8]>),
    /// The response depends on something outside of the request's fields, or on too many fields.
    Unknown,
}

impl Vary {
    /// Parses the values of the field.
    pub fn parse<'v>(values: impl IntoIterator<Item = &'v [u8]>) -> Vary {
        let mut names: Vec<Vec<u8>> = Vec::new();
        for name in values.into_iter().flat_map(|value| value.split(|&byte| byte == b',')).map(<[u8]>::trim_ascii) {
            if name == b"*" {
                return Vary::Unknown;
            }
            if !name.is_empty() {
                names.push(name.to_ascii_lowercase());
                if names.len() > 4 * COUNT_MAX {
                    return Vary::Unknown;
                }
            }
        }
        names.sort_unstable();
        names.dedup();
        let joined = names.join(&b',');
        match joined.len() {
            0 => Vary::Nothing,
            length if length > NAMES_MAX || names.len() > COUNT_MAX => Vary::Unknown,
            _ => Vary::Fields(joined.into()),
        }
    }
}

/// Appends a request's values of these fields: for each name its values, joined by commas, and a separator that no
/// value can contain. `values` returns those of one field in order. With `normalizes_language`, the languages of
/// `Accept-Language` are in lower case, sorted and without duplicates.
pub fn append_variant<'r, I: Iterator<Item = &'r [u8]>>(
    names: &[u8],
    mut values: impl FnMut(&[u8]) -> I,
    normalizes_language: bool,
    out: &mut Vec<u8>,
) {
    for name in names.split(|&byte| byte == b',') {
        out.extend_from_slice(name);
        out.push(b':');
        if normalizes_language && name == b"accept-language" {
            append_languages(values(name), out);
            continue;
        }
        let mut is_first = true;
        for value in values(name) {
            for part in value.split(|&byte| byte == b',').map(<[u8]>::trim_ascii).filter(|part| !part.is_empty()) {
                if !is_first {
                    out.push(b',');
                }
                is_first = false;
                out.extend_from_slice(part);
            }
        }
        out.push(b'\n');
    }
}

/// Appends the languages of these values, with their weights, as one list that is equal for all orders.
fn append_languages<'r>(values: impl Iterator<Item = &'r [u8]>, out: &mut Vec<u8>) {
    let parts = values.flat_map(|value| value.split(|&byte| byte == b','));
    let mut languages: Vec<Vec<u8>> = parts.map(plain_language).filter(|part| !part.is_empty()).collect();
    languages.sort_unstable();
    languages.dedup();
    out.extend_from_slice(&languages.join(&b','));
    out.push(b'\n');
}

/// A language and its weight in lower case, without the white space that the grammar allows around `;` and `=`. Other
/// white space stays: `d e` is not `de`. (RFC 9110 §12.4.2, §12.5.4)
fn plain_language(part: &[u8]) -> Vec<u8> {
    let parameters = part.split(|&byte| byte == b';').map(|parameter| {
        let sides: Vec<&[u8]> = parameter.split(|&byte| byte == b'=').map(<[u8]>::trim_ascii).collect();
        sides.join(&b'=')
    });
    parameters.collect::<Vec<_>>().join(&b';').to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_that_mean_the_same_are_the_same() {
        let fields = |values: &[&str]| Vary::parse(values.iter().map(|value| value.as_bytes()));
        let expected = Vary::Fields(b"accept,user-agent".as_slice().into());
        for values in [&["Accept, User-Agent"][..], &["user-agent", "ACCEPT ,accept"], &[",Accept,,User-Agent,"]] {
            assert_eq!(fields(values), expected);
        }
        assert_eq!((fields(&["*"]), fields(&["accept", "x, *"])), (Vary::Unknown, Vary::Unknown));
        assert_eq!((fields(&[]), fields(&[" , "])), (Vary::Nothing, Vary::Nothing));
        let bomb: String = (0..1000).map(|number| format!("x-{number},")).collect();
        assert_eq!(fields(&[&bomb]), Vary::Unknown);
    }

    #[test]
    fn variants_differ_where_values_do() {
        let variant = |values: &[&'static str]| {
            let mut out = Vec::new();
            let of_accept = |name: &[u8]| {
                let count = if name == b"accept" { values.len() } else { 0 };
                values[..count].iter().map(|value| value.as_bytes())
            };
            append_variant(b"accept,x", of_accept, true, &mut out);
            out
        };
        assert_eq!(variant(&["a, b"]), variant(&["a ,b"]));
        assert_eq!(variant(&["a", "b"]), variant(&["a,b"]));
        assert_ne!(variant(&["a"]), variant(&["b"]));
        assert_ne!(variant(&[]), variant(&["a"]));
    }

    #[test]
    fn languages_are_normalized_where_that_is_wanted() {
        let variant = |value: &'static str, normalizes_language| {
            let mut out = Vec::new();
            let values = |_: &[u8]| std::iter::once(value.as_bytes());
            append_variant(b"accept-language", values, normalizes_language, &mut out);
            out
        };
        for same in ["de, en", "EN,dE", " en , de,en"] {
            assert_eq!(variant(same, true), variant("en, de", true), "{same}");
            assert_ne!(variant(same, false), variant("en, de", false), "{same}");
        }
        assert_eq!(variant("en;q=0.5, de", true), variant("de,en ; q = 0.5", true));
        for other in ["en", "en, fr", "en;q=0.5, de", "e, nde", "en, d e", "e n,de", "en;de"] {
            assert_ne!(variant(other, true), variant("en, de", true), "{other}");
        }
    }
}
