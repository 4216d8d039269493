//! Which responses a filter is for, by their media types: `gzip_types`, `sub_filter_types` and their kin.
//! (<https://nginx.org/en/docs/http/ngx_http_gzip_module.html#gzip_types>)
//!
//! `text/html` is always among them. Parameters of a type and case do not count.

use bstr::BStr;
use gale_config::{Diagnostic, Statement};

use crate::request::response::ShortText;
use gale_engine::configuration::Builder;

/// The types that one statement lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MediaTypes {
    /// `*`
    Any,
    /// These, in lower case and in order.
    These(Vec<Box<[u8]>>),
}

/// What every list begins with.
const ALWAYS: &[u8] = b"text/html";

impl MediaTypes {
    /// The arguments of a statement, for a row `ManyWith { parse: MediaTypes::parse, … }` whose default is `text/html`.
    pub fn parse(builder: &mut Builder, statement: &Statement) -> Result<MediaTypes, Diagnostic> {
        let mut names: Vec<Box<[u8]>> = vec![ALWAYS.into()];
        for word in &statement.args {
            if word.text == "*" {
                return Ok(MediaTypes::Any);
            }
            let name = word.text.to_ascii_lowercase().into_boxed_slice();
            if !names.contains(&name) {
                names.push(name);
            } else if word.span != statement.span {
                // Written by a person: the words of a default have the place of the statement.
                let message = format!("duplicate MIME type \"{}\"", BStr::new(&name));
                builder.note([Diagnostic::warn(message).at(word.span)]);
            }
        }
        names.sort_unstable();
        Ok(MediaTypes::These(names))
    }

    /// Whether one of the lists has the type of a response with this `Content-Type`. None has that of one without.
    pub fn contain(lists: &[MediaTypes], content_type: &[u8]) -> bool {
        let end = content_type.iter().position(|&byte| byte == b';').unwrap_or(content_type.len());
        let mut name = ShortText::from_slice(content_type[..end].trim_ascii_end());
        name.make_ascii_lowercase();
        lists.iter().any(|list| match list {
            MediaTypes::Any => true,
            MediaTypes::These(names) => names.binary_search_by(|known| known[..].cmp(&name)).is_ok(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_and_case_do_not_count() {
        let lists = [MediaTypes::These(vec![b"a/b".as_slice().into()]), MediaTypes::These(vec![ALWAYS.into()])];
        for content_type in ["text/html", "Text/HTML; charset=utf-8", "text/html ;x", "a/b"] {
            assert!(MediaTypes::contain(&lists, content_type.as_bytes()), "{content_type}");
        }
        for content_type in ["", "text/htm", "text/html2", "b/a"] {
            assert!(!MediaTypes::contain(&lists, content_type.as_bytes()), "{content_type}");
        }
        assert!(MediaTypes::contain(&[MediaTypes::Any], b""));
    }
}
