//! `Vary`: which fields of a request a response depends on. (RFC 9111 §4.1)
//!
//! The names are in lower case, in order and each once, so that lists that mean the same are the same; values are
//! compared without the white space round their commas. Fields that no client sends twice in one way are the site's to
//! normalise, but for `Accept-Language`: a location may have its case, order and repetitions ignored.

/// Most bytes of all names together; a longer list is not stored.
pub const NAMES_MAX: usize = 512;

/// Most names.
const COUNT_MAX: usize = 16;

/// What a response depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Vary {
    /// On nothing in the request.
    Nothing,
    /// On these fields: names in lower case, separated by commas.
    Fields(Box<[u8]>),
    /// On something that is not in the request, or on more than is kept.
    Unknown,
}

impl Vary {
    /// What these field values say.
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

/// Appends what a request has in these fields: of each name its values, joined by commas, and a separator that no value
/// can contain. `values` gives those of one field in their order. Of `Accept-Language` the languages are sorted, in
/// lower case and each once, if the location wants that.
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

/// Appends the languages of these values, with their weights, as one list that is the same for all orders.
fn append_languages<'r>(values: impl Iterator<Item = &'r [u8]>, out: &mut Vec<u8>) {
    let parts = values.flat_map(|value| value.split(|&byte| byte == b','));
    let mut languages: Vec<Vec<u8>> = parts.map(plain_language).filter(|part| !part.is_empty()).collect();
    languages.sort_unstable();
    languages.dedup();
    out.extend_from_slice(&languages.join(&b','));
    out.push(b'\n');
}

/// A language and its weight in lower case, without the white space that the grammar allows around `;` and `=`. White
/// space elsewhere stays: `d e` is not `de`. (RFC 9110 §12.4.2, §12.5.4)
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
