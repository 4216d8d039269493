//! Bodies: of the client's request on its way to a server, and of responses ahead of a slow client.

use std::path::Path;

use gale_config::{Diagnostic, Setting};
use gale_http::request::variables::template::SizeTemplate;
use gale_spool::TempPath;

use super::{SettingsGroup, UpstreamSettings};

/// Passing of the client's request.
#[derive(Default)]
pub struct RequestBodySettings {
    /// Read the request's body completely first.
    pub request_buffering: Setting<bool>,
    /// Pass the client's fields on.
    pub pass_request_headers: Setting<bool>,
    /// Pass the request's body on.
    pub pass_request_body: Setting<bool>,
    /// Continue a request after its client has left.
    pub ignore_client_abort: Setting<bool>,
}

impl SettingsGroup for RequestBodySettings {
    fn absent() -> RequestBodySettings {
        RequestBodySettings {
            request_buffering: Setting::of(false),
            pass_request_headers: Setting::of(true),
            pass_request_body: Setting::of(true),
            ignore_client_abort: Setting::of(false),
        }
    }
}

/// Reading of responses ahead of the client.
#[derive(Default)]
pub struct ResponseBodySettings {
    /// Read responses ahead of the client.
    pub buffering: Setting<bool>,
    /// Number and size of the buffers for a response ahead of its client in memory.
    pub buffers: Setting<(u64, u64)>,
    /// Accepted without effect: the client's side bounds the data being sent.
    pub busy_buffers_size: Setting<u64>,
    /// Maximum length of a response's temporary file, in bytes.
    pub max_temp_file_size: Setting<u64>,
    /// Accepted without effect: the spool combines its writes.
    pub temp_file_write_size: Setting<u64>,
    /// Directory of temporary files.
    pub temp_path: Setting<TempPath>,
    /// Bytes of a response read per second; 0 for no limit.
    pub limit_rate: Setting<SizeTemplate>,
    /// Support ranges even if the server does not announce them.
    pub force_ranges: Setting<bool>,
}

impl SettingsGroup for ResponseBodySettings {
    fn absent() -> ResponseBodySettings {
        ResponseBodySettings {
            buffering: Setting::of(false),
            buffers: Setting::of((8, 4096)),
            busy_buffers_size: Setting::new(),
            max_temp_file_size: Setting::of(0),
            temp_file_write_size: Setting::new(),
            // Never opened: the file may have no byte.
            temp_path: Setting::of(TempPath { path: Path::new("").into(), levels: [1, 2].into_iter().collect() }),
            limit_rate: Setting::of(SizeTemplate::Constant(0)),
            force_ranges: Setting::of(false),
        }
    }
}

impl ResponseBodySettings {
    /// Compares the sizes with each other and with `head`, that of the head's buffer. `prefix` is that of the
    /// directives.
    ///
    /// # Errors
    /// Sizes that contradict each other, in nginx's words.
    pub(super) fn check(&self, prefix: &str, head: u64) -> Result<(), Diagnostic> {
        let (count, size) = *self.buffers.get();
        let error = |setting_name: &str, text: String| Diagnostic::emerg(format!("\"{prefix}_{setting_name}\" {text}"));
        if count < 2 {
            return Err(error("buffers", "must be at least 2 buffers".to_owned()).at_opt(self.buffers.span()));
        }
        let largest = head.max(size);
        let busy = *self.busy_buffers_size.get_opt().unwrap_or(&0);
        let of_largest = format!(
            "must be equal to or greater than the maximum of the value of \"{prefix}_buffer_size\" and one of the \
             \"{prefix}_buffers\""
        );
        if busy != 0 && busy < largest {
            return Err(error("busy_buffers_size", of_largest).at_opt(self.busy_buffers_size.span()));
        }
        let all_but_one = size.saturating_mul(count - 1);
        let of_all = format!("must be less than the size of all \"{prefix}_buffers\" minus one buffer");
        if busy != 0 && busy > all_but_one {
            return Err(error("busy_buffers_size", of_all).at_opt(self.busy_buffers_size.span()));
        }
        let write = *self.temp_file_write_size.get_opt().unwrap_or(&0);
        if write != 0 && write < largest {
            return Err(error("temp_file_write_size", of_largest).at_opt(self.temp_file_write_size.span()));
        }
        let file_max = *self.max_temp_file_size.get();
        if file_max != 0 && file_max < largest {
            let text = format!("must be equal to zero to disable temporary files usage or {of_largest}");
            return Err(error("max_temp_file_size", text).at_opt(self.max_temp_file_size.span()));
        }
        Ok(())
    }
}

impl UpstreamSettings {
    /// Maximum number of bytes of a response ahead of its client in memory.
    pub fn buffers_bytes(&self) -> u64 {
        let (count, size) = *self.response_body.buffers.get();
        count.saturating_mul(size)
    }
}
