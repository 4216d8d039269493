//! Settings of `proxy_store`: the file of a response.
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_store>)

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gale_base::log_level::Level;
use gale_config::Setting;
use gale_engine::configuration::{KnownPath, Reach};
use gale_http::request::Request;
use gale_http::request::configuration::Scope;
use gale_http::request::files::{find_path, may_lead_out};
use gale_http::variables::template::Template;

/// Settings of a location for storing: `proxy_store`, `proxy_store_access`.
#[derive(Default)]
pub struct StoreSettings {
    /// Destination of stored responses.
    pub to: Setting<StoreTo>,
    /// The permissions of the files.
    pub access: Setting<u32>,
}

/// Destination of stored responses.
#[derive(Clone, Default)]
pub enum StoreTo {
    /// Nowhere.
    #[default]
    Off,
    /// The path by `root` or `alias` for the request's URI.
    Document,
    /// This path; relative to the second one, unless it is absolute.
    Path(Template, Arc<Path>),
}

impl StoreSettings {
    /// True if responses are stored.
    pub fn is_on(&self) -> bool {
        !matches!(self.to.get_opt(), None | Some(StoreTo::Off))
    }

    /// Notes the directories to which requests of this scope write files.
    pub fn note_reach(&self, scope: &Scope, directive: &str, reach: &mut Reach) {
        match self.to.get_opt() {
            None | Some(StoreTo::Off) => {}
            Some(StoreTo::Document) => reach.writes(scope.core.root.get().known_path(), directive),
            // For a whole path this includes its directory, where the file replaces another one.
            Some(StoreTo::Path(template, prefix)) => match template.known_path() {
                KnownPath::Beginning(b"") => reach.writes(KnownPath::Beginning(b""), directive),
                KnownPath::Whole(path) | KnownPath::Beginning(path) => {
                    let path = prefix.join(OsStr::from_bytes(path));
                    reach.writes(KnownPath::Beginning(path.as_os_str().as_bytes()), directive);
                }
            },
        }
    }

    /// The path of the file for a response to this request.
    pub(super) fn path(&self, request: &Request) -> Option<PathBuf> {
        let mut path = Vec::new();
        let prefix = match self.to.get_opt()? {
            StoreTo::Off => return None,
            StoreTo::Document => {
                find_path(request, &mut path).ok()?;
                None
            }
            StoreTo::Path(template, prefix) => {
                path = template.evaluate(request);
                // A path with variables must not lead out of the directory.
                if template.as_constant().is_none() && may_lead_out(&path) {
                    let path = bstr::BStr::new(&path);
                    request.log(Level::Error, format_args!("unsafe path \"{path}\", the response is not stored"));
                    return None;
                }
                Some(prefix)
            }
        };
        // A path that ends with a slash names no file.
        if path.is_empty() || path.ends_with(b"/") || path.contains(&0) {
            return None;
        }
        let path = Path::new(OsStr::from_bytes(&path));
        Some(prefix.map_or_else(|| path.to_owned(), |prefix| prefix.join(path)))
    }
}
