//! The media types of responses that a filter applies to: `gzip_types`, `sub_filter_types` and similar directives.
//! (<https://nginx.org/en/docs/http/ngx_http_gzip_module.html#gzip_types>)
//!
//! `text/html` is always included. Parameters of a type are ignored, as is case.

use bstr::BStr;
use gale_config::{Diagnostic, Statement};

use crate::request::response::ShortText;
use gale_engine::configuration::Builder;

/// The types that one statement lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MediaTypes {
    /// `*`
    Any,
    /// These types, in lower case and sorted.
    These(Vec<Box<[u8]>>),
}

/// The first type of every list.
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
                // The words of a default have the span of the statement: only words of the file can be duplicates.
                let message = format!("duplicate MIME type \"{}\"", BStr::new(&name));
                builder.note([Diagnostic::warn(message).at(word.span)]);
            }
        }
        names.sort_unstable();
        Ok(MediaTypes::These(names))
    }

    /// True if one of the lists has the media type of this `Content-Type`. An empty `Content-Type` matches only `*`.
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
